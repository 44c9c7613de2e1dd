"""vLLM's gRPC service for routers: vllm.grpc.engine.VllmEngine."""

from __future__ import annotations

import time
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

import outrider
from gateway.admission.admission import check_size
from gateway.facade.backend import Backend
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
from gateway.text.encoding import cut, encode
from outrider.errors import InvalidRequest

# Images, and prompts whose KV cache is on another worker.
_UNSUPPORTED = ("mm_inputs", "extra_mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")


class VllmFacade(Facade, vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Calls of VllmEngine."""

    name = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
    messages = pb
    register = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server

    async def Generate(self, request: Any, context: Any) -> None:  # noqa: N802
        """The end of every choice, after chunks if the request streams."""
        async with self._call(context, generates=True) as backend:
            check_size(request.ByteSize(), backend.facts.config.max_body_bytes)
            wanted = choices(await _request(backend, request), request.sampling_params.n)
            reply = MessageReply(pb, wanted, stream=request.stream)
            name = name_of(request)
            async with self._started(backend, context, wanted, name, stream=request.stream) as generations:
                sender = Sender(context, generations, backend.facts.config.slow_reader_timeout)
                async for message in reply.messages(generations):
                    await sender.send(message)

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Abort requests; their callers keep the text so far."""
        async with self._call(context) as backend:
            for name in request.request_ids:
                await backend.abort(name)
            return pb.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Facts about the model."""
        del request
        async with self._call(context) as backend:
            return pb.GetModelInfoResponse(**model_facts(backend))

    async def GetServerInfo(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Facts about the gateway and its targets."""
        del request
        async with self._call(context) as backend:
            target = backend.facts.target
            return pb.GetServerInfoResponse(
                active_requests=backend.generator.admission.running,
                last_receive_timestamp=self._received,
                uptime_seconds=time.time() - backend.started,
                server_type="vllm-grpc",
                data_parallel_size=1,
                kv_cache_dtype=target.kv_cache_dtype,
                block_size=target.page_size,
                model_dtype=target.model.dtype,
                max_num_seqs=self._loads.fields(backend)["max_running_requests"],
            )

    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        """The load of all targets as one."""
        del request
        async with self._call(context) as backend:
            load = pb.SchedulerLoad(**self._loads.fields(backend))
            return pb.GetLoadsResponse(timestamp=now(), version=outrider.__version__, dp_rank_count=1, loads=[load])


async def _request(backend: Backend, request: Any) -> GenerationRequest:
    """The request as a specification. Raises InvalidRequest."""
    refuse_unsupported(request, _UNSUPPORTED)
    params = request.sampling_params
    temperature = params.temperature if params.HasField("temperature") else 1.0
    max_tokens = max_tokens_of(params, "max_tokens")
    if max_tokens == 0:  # as in vLLM
        raise InvalidRequest("max_tokens must be 1 or more", param="max_tokens")
    length = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    return GenerationRequest(
        cut(await _prompt(backend, request), length, backend.generator.max_session_tokens - (max_tokens or 1)),
        sampling_of(params, temperature, params.top_k, params.logit_bias.items()),
        StopOptions(
            max_tokens,
            min_tokens=params.min_tokens,
            strings=tuple(params.stop),
            token_ids=tuple(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
        ),
        TextOptions(include_stop=params.include_stop_str_in_output, verbatim=not params.skip_special_tokens),
        seed=params.seed if params.HasField("seed") else None,
        grammar=grammar(params),
        logprobs=logprobs_count(params.logprobs, "logprobs") if params.HasField("logprobs") else None,
        prompt_logprobs=(
            logprobs_count(params.prompt_logprobs, "prompt_logprobs") if params.HasField("prompt_logprobs") else None
        ),
    )


async def _prompt(backend: Backend, request: Any) -> list[int]:
    match request.WhichOneof("input"):
        case "tokenized":
            return list(request.tokenized.input_ids)
        case "text":
            return await encode(backend.generator.tokenizer, request.text)
    raise InvalidRequest("set one of tokenized and text", param="input")
