"""SGLang's gRPC service for routers: sglang.grpc.scheduler.SglangScheduler.

Its messages have no field for a seed; the gateway reads `sampling_seed` from custom_params.
"""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto import sglang_scheduler_pb2 as pb
from smg_grpc_proto import sglang_scheduler_pb2_grpc

import outrider
from gateway.admission.admission import check_size
from gateway.facade.base import Facade
from gateway.facade.info import model_facts, now
from gateway.facade.requests import (
    choices,
    grammar,
    logprobs_count,
    max_tokens_of,
    name_of,
    refuse_unsupported,
    sampling_of,
)
from gateway.facade.responses import MessageReply
from gateway.grpc.sending import Sender
from gateway.sessions.request import GenerationRequest, StopOptions, TextOptions
from outrider.errors import InvalidRequest

_UNSUPPORTED = (
    "mm_inputs", "disaggregated_params", "custom_logit_processor", "input_embeds", "lora_id", "token_ids_logprob",
    "return_hidden_states",
)  # fmt: skip
_SEED = "sampling_seed"


class SglangFacade(Facade, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]
    """Calls of SglangScheduler."""

    name = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
    messages = pb
    register = sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        """The end of every choice, after chunks if the request streams."""
        async with self._call(context, generates=True) as backend:
            check_size(request.ByteSize(), backend.facts.config.max_body_bytes)
            wanted = choices(_request(request), request.sampling_params.n)
            name = name_of(request)
            reply = MessageReply(
                pb,
                wanted,
                stream=request.stream,
                counts_all=True,
                prompt_from=max(request.logprob_start_len, 0),
                envelope={"request_id": name},
            )
            async with self._started(backend, context, wanted, name, stream=request.stream) as generations:
                sender = Sender(context, generations, backend.facts.config.slow_reader_timeout)
                async for message in reply.messages(generations):
                    await sender.send(message)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Abort a request; its caller keeps the text so far."""
        async with self._call(context) as backend:
            found = await backend.abort(request.request_id)
            return pb.AbortResponse(success=bool(found), message="" if found else "there is no such request")

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Facts about the model."""
        del request
        async with self._call(context) as backend:
            return pb.GetModelInfoResponse(**model_facts(backend), weight_version=backend.control.weights.version)

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Facts about the gateway and its targets."""
        del request
        async with self._call(context) as backend:
            config = backend.facts.server_info(backend.generator)
            started = Timestamp()
            started.FromSeconds(int(backend.started))
            return pb.GetServerInfoResponse(
                server_args=ParseDict(_plain({k: v for k, v in config.items() if k != "internal_states"}), Struct()),
                scheduler_info=ParseDict(_plain(self._loads.fields(backend)), Struct()),
                active_requests=backend.generator.admission.running,
                last_receive_timestamp=self._received,
                uptime_seconds=time.time() - backend.started,
                sglang_version=outrider.__version__,
                server_type="grpc",
                start_time=started,
                max_total_num_tokens=self._loads.fields(backend)["max_total_num_tokens"],
            )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The load of all targets as one."""
        del request
        async with self._call(context) as backend:
            fields, tally = self._loads.fields(backend), backend.generator.metrics.tally
            speculative = pb.SpeculativeMetrics(accept_length=tally.accept_length, accept_rate=tally.acceptance_rate)
            aggregate = pb.AggregateMetrics(
                total_running_reqs=fields["num_running_reqs"],
                total_waiting_reqs=fields["num_waiting_reqs"],
                total_reqs=fields["num_total_reqs"],
                avg_token_usage=fields["token_usage"],
                avg_throughput=fields["gen_throughput"],
                avg_utilization=fields["utilization"],
            )
            return pb.GetLoadsResponse(
                timestamp=now(),
                version=outrider.__version__,
                dp_rank_count=1,
                loads=[pb.SchedulerLoad(**fields, speculative=speculative)],
                aggregate=aggregate,
            )

    async def ListLoadedLoRAAdapters(self, request: Any, context: Any) -> Any:  # noqa: N802
        """There are none."""
        del request
        async with self._call(context):
            return pb.ListLoadedLoRAAdaptersResponse()

    async def LoadLoRAAdapter(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Refused."""
        del request
        await self._refuse(context, "this server has no adapters")

    UnloadLoRAAdapter = LoadLoRAAdapter


def _request(request: Any) -> GenerationRequest:
    """The request as a specification. Raises InvalidRequest."""
    refuse_unsupported(request, _UNSUPPORTED)
    params, prompt = request.sampling_params, list(request.tokenized.input_ids)
    top = logprobs_count(request.top_logprobs_num, "top_logprobs_num") if request.return_logprob else None
    start = request.logprob_start_len
    if top is not None and start >= max(len(prompt), 1):
        raise InvalidRequest(
            f"logprob_start_len must be less than the prompt's {len(prompt)} tokens", param="logprob_start_len"
        )
    return GenerationRequest(
        prompt,
        sampling_of(params, params.temperature, params.top_k, _biases(params)),
        StopOptions(
            max_tokens_of(params, "max_new_tokens"),
            min_tokens=params.min_new_tokens,
            strings=tuple(params.stop),
            token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        ),
        TextOptions(include_stop=params.no_stop_trim, verbatim=not params.skip_special_tokens),
        seed=_seed(params),
        grammar=grammar(params),
        logprobs=top,
        prompt_logprobs=top if start >= 0 else None,
        scaled_logprobs=True,
    )


def _biases(params: Any) -> list[tuple[int, float]]:
    try:
        return [(int(token), value) for token, value in params.logit_bias.items()]
    except ValueError:
        raise InvalidRequest("logit_bias must name tokens by their ids", param="logit_bias") from None


def _seed(params: Any) -> int | None:
    fields = dict(params.custom_params.items()) if params.HasField("custom_params") else {}
    seed = fields.pop(_SEED, None)
    if fields:
        raise InvalidRequest(f"custom_params may have {_SEED} alone", param="custom_params")
    if seed is None:
        return None
    if not isinstance(seed, float) or not seed.is_integer():
        raise InvalidRequest(f"{_SEED} must be an integer", param="custom_params")
    return int(seed)


def _plain(value: Any) -> Any:
    """A value in types that a Struct can hold."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
