"""The Ray actor of a replica: verl's token-in, token-out calls become requests of the gateway."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.integrations.launch import LaunchedGateway
from outrider.integrations.rollouts import RolloutError, RolloutGateway
from outrider.integrations.verl.options import Options, ReplicaFacts

_KEY_VARIABLE = "OUTRIDER_ADMIN_API_KEY"
_FLUSH_SECONDS = 30.0  # for aborted requests to end
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}  # as of vLLM


class OutriderServer:
    """Asks one gateway, which runs already or is its child, for rollouts. Its methods are those that verl calls."""

    def __init__(
        self, facts: ReplicaFacts, options: Options, address: str | None, environment: Mapping[str, str] | None = None
    ) -> None:
        """address: of a gateway that runs; None to start one, with these variables in its environment."""
        self._facts, self._options, self._environment = facts, options, dict(environment or {})
        self._address = address
        self._child: LaunchedGateway | None = None
        self._gateway: RolloutGateway | None = None
        self._context = 0
        self._refuses = False
        self._global_steps: int | None = None

    async def start(self) -> None:
        """Start or reach the gateway. Raises RolloutError if it does not answer."""
        if self._address is None:
            self._child = LaunchedGateway(self._options.command, _own_address(), self._flags())
            await self._child.start(self._options.start_seconds, self._environment)
        url, key = await self.endpoint()
        gateway = RolloutGateway(url, key, self._options.patience)
        self._gateway = await gateway.__aenter__()  # for the life of the actor
        try:
            info = await gateway.get("/server_info")
        except RolloutError as error:
            raise RolloutError(f"no gateway of Outrider answers: {error}") from error
        own = int(info["context_length"])
        self._context = min(own, self._facts.max_model_len or own)

    async def stop(self) -> None:
        """End the connections, and the gateway if it is a child."""
        if self._gateway is not None:
            await self._gateway.__aexit__(None, None, None)
        if self._child is not None:
            await self._child.stop()

    async def endpoint(self) -> tuple[str, str]:
        """URL of the gateway and key of an administrator, which is empty where none is needed."""
        if self._child is not None:
            return self._child.url, self._child.key
        address = self._address or ""
        return address if "://" in address else f"http://{address}", os.environ.get(_KEY_VARIABLE, "")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        **options: Any,
    ) -> Any:
        """One rollout, as verl's TokenOutput. Raises RolloutError for what the gateway refuses."""
        from verl.workers.rollout.replica import TokenOutput

        if any(data is not None and len(data) for data in (image_data, video_data, options.pop("audio_data", None))):
            raise ValueError("Outrider serves text: leave images, videos and sounds out")
        return TokenOutput(**await self.answer(prompt_ids, sampling_params, request_id))

    async def answer(
        self, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], request_id: str
    ) -> dict[str, Any]:
        """One rollout: the fields of verl's TokenOutput."""
        if self._refuses:
            raise RolloutError("this replica takes no rollouts until generation is resumed")
        body = self._request(list(map(int, prompt_ids)), sampling_params, request_id)
        if body["sampling_params"]["max_new_tokens"] == 0:
            return self._fields([], {"finish_reason": {"type": "length"}, "output_token_logprobs": []})
        found = await self._ready().generate(body)
        return self._fields(found["output_ids"], found["meta_info"])

    async def set_global_steps(self, global_steps: int) -> None:
        """The trainer's step whose weights are served."""
        self._global_steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all rollouts with what they have; new ones wait, or are refused, until generation is resumed."""
        self._refuses = reject_request
        await self._ready().post("/pause_generation", {"mode": "abort"})

    async def resume_generation(self) -> None:
        """Go on after abort_all_requests."""
        self._refuses = False
        await self._ready().post("/continue_generation")

    async def wake_up(self) -> None:
        """As resume_kv_cache; the weights were kept."""
        await self.resume_kv_cache()

    async def sleep(self) -> None:
        """As release_kv_cache; weights stay in memory."""
        await self.release_kv_cache()

    async def clear_kv_cache(self) -> None:
        """Drop cached prefixes."""
        await self._ready().post(f"/flush_cache?timeout={_FLUSH_SECONDS:.0f}")

    async def release_kv_cache(self) -> None:
        """Return the KV cache's memory, with `free_cache_engine`."""
        if self._facts.frees_cache:
            try:
                await self._ready().post("/release_memory_occupation", {"tags": ["kv_cache"]})
            except RolloutError as error:
                raise RolloutError(f"{error}; set actor_rollout_ref.rollout.free_cache_engine=False") from error

    async def resume_kv_cache(self) -> None:
        """Take the KV cache's memory again."""
        if self._facts.frees_cache:
            await self._ready().post("/resume_memory_occupation", {"tags": ["kv_cache"]})

    def _request(self, prompt: list[int], given: Mapping[str, Any], request_id: str) -> dict[str, Any]:
        """The body of /generate. Raises ValueError for a prompt that fills the context."""
        facts = self._facts
        sampling = {_RENAMED.get(name, name): value for name, value in given.items()}
        returns_logprobs = bool(sampling.pop("logprobs", False))
        if sampling.pop("prompt_logprobs", None) is not None:
            raise ValueError("log-probabilities of prompts, for distillation, are not supported; use another teacher")
        room = self._context - len(prompt)
        if room < 0:
            raise ValueError(f"the prompt has {len(prompt)} tokens, more than the context of {self._context}")
        if (count := sampling.get("max_new_tokens")) is None:
            count = min(facts.response_length, facts.prompt_length + facts.response_length - len(prompt))
        sampling["max_new_tokens"] = max(0, min(count, room))
        sampling.setdefault("ignore_eos", facts.ignore_eos)
        if facts.seed is not None and sampling.get("sampling_seed") is None:
            sampling["sampling_seed"] = seed_of(facts.seed, request_id)
        return {"rid": request_id, "input_ids": prompt, "sampling_params": sampling, "return_logprob": returns_logprobs}

    def _fields(self, tokens: list[int], info: Mapping[str, Any]) -> dict[str, Any]:
        """Of verl's TokenOutput."""
        version = info.get("weight_version", "")
        entries = info.get("output_token_logprobs")
        return {
            "token_ids": tokens,
            "log_probs": None if entries is None else [float(value) for value, *_ in entries],
            "stop_reason": info["finish_reason"]["type"],
            "extra_fields": {
                "global_steps": int(version) if version.isdecimal() else self._global_steps,
                "num_cached_tokens": info.get("cached_tokens", 0),
                "sampling_seed": info.get("sampling_seed"),
                "spec_num_draft_tokens": info.get("spec_draft_token_num", 0),
                "spec_num_accepted_tokens": info.get("spec_accept_token_num", 0),
                "spec_num_verify_steps": info.get("spec_verify_ct", 0),
            },
        }

    def _flags(self) -> dict[str, Any]:
        facts = self._facts
        flags = {
            "model_path": facts.model_path,
            "tp_size": facts.tp_size,
            "dtype": facts.dtype,
            "context_length": facts.max_model_len,
        }
        return {**flags, **self._options.flags}

    def _ready(self) -> RolloutGateway:
        assert self._gateway is not None, "start comes first"
        return self._gateway


def seed_of(seed: int, request_id: str) -> int:
    """A seed of a rollout, the same in each run: the answers to one prompt differ by their request ids."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{request_id}".encode(), digest_size=7).digest(), "little")


def _own_address() -> str:
    """This machine's address, as other nodes of the Ray cluster reach it."""
    import ray

    address: str = ray.util.get_node_ip_address().strip("[]")
    return address
