"""The gRPC API: GatewayService, with the same sessions as REST."""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import outrider
from gateway.admission.admission import Keys, check_size
from gateway.admission.caller import peer_network
from gateway.admission.retry_after import time_away
from gateway.control.models import Models, Serving
from gateway.grpc.sending import Sender
from gateway.orchestration.generation import Part
from gateway.sessions.request import GenerationRequest, StopOptions, TextOptions
from gateway.telemetry.spans import spanning_call
from gateway.text.encoding import MAX_PIECES, encode, encode_chat
from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Unavailable
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason, Logprobs
from outrider.telemetry import REQUEST_ID
from outrider.tracing import Tracing
from outrider.transport.statuses import statuses, with_status
from outrider.wire.opens import draft_sources_from_pb, source_to_pb
from outrider.wire.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
_METHOD = f"{SERVICE_NAME}/Generate"

_FINISH_REASONS = {reason: common_pb2.FinishReason.Name(int(reason)) for reason in FinishReason}


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Generate and GetGatewayInfo."""

    def __init__(self) -> None:
        self._models: Models | None = None
        self._config: GatewayConfig
        self._keys: Keys | None = None
        self._since = time.monotonic()
        self._tracing: Tracing | None = None

    def serve(
        self, models: Models, config: GatewayConfig, keys: Keys | None = None, tracing: Tracing | None = None
    ) -> None:
        """Answer calls from now on; before that every call is Unavailable."""
        self._models, self._config, self._keys, self._tracing = models, config, keys, tracing

    def _request_of(self, context: Any) -> AbstractContextManager[None]:
        """Context of a caller's running request. Raises Unauthenticated, TooManyRequests."""
        if self._keys is None:
            return nullcontext()
        metadata = dict(context.invocation_metadata() or ())
        authorization = str(metadata.get("authorization", "")).encode()
        return self._keys.request(self._keys.check(authorization, network=peer_network(context.peer())))

    def _ready(self) -> Models:
        if self._models is None:
            seconds = time_away(self._since)
            raise Unavailable("the gateway is starting; it waits for a target service", retry_after=seconds)
        return self._models

    @with_status
    async def GetGatewayInfo(
        self, request: gateway_pb2.GetGatewayInfoRequest, context: Any
    ) -> gateway_pb2.GetGatewayInfoResponse:
        """Facts about a model that is served."""
        models = self._ready()
        with self._request_of(context):
            model = models.choose(request.model)
            generator = model.generator
            drafts = [link.info for link in generator.orchestrator.drafts if link.up and link.info is not None]
            return gateway_pb2.GetGatewayInfoResponse(
                software_version=outrider.__version__,
                served_model_name=generator.name,
                model=model.facts.target.model,
                drafters=sorted({name for info in drafts for name in info.drafters}),
                max_session_tokens=generator.max_session_tokens,
                served_models=models.names,
            )

    async def Generate(self, request: gateway_pb2.GenerateRequest, context: Any) -> None:
        """Stream the parts of one generation."""
        request_id = f"gen-{secrets.token_hex(12)}"
        REQUEST_ID.set(request_id)
        async with statuses(context):
            traced = spanning_call(self._tracing, context, _METHOD, request_id, chat=request.HasField("chat"))
            with self._request_of(context), traced as span:
                models = self._ready()
                check_size(request.ByteSize(), self._config.max_body_bytes)
                model = models.choose(request.model)
                wanted = await _request(model, request), request_id
                (generation,) = await model.generator.start_all([wanted], span)
                sender = Sender(context, [generation], self._config.slow_reader_timeout)
                try:
                    finish = FinishReason.RUNNING
                    while finish is FinishReason.RUNNING:
                        part = await generation.next()
                        finish = part.finish
                        await sender.send(_response(request_id, part, generation.seed))
                finally:
                    generation.close()


_ROLES = {"developer": "system"}  # as in REST


async def _request(model: Serving, request: gateway_pb2.GenerateRequest) -> GenerationRequest:
    """The request as a specification. Raises InvalidRequest."""

    def given(name: str, default: Any = None) -> Any:
        return getattr(request, name) if request.HasField(name) else default

    max_tokens = given("max_tokens")
    if max_tokens == 0:
        raise InvalidRequest("max_tokens must be 1 or more", param="max_tokens")
    sampling = model.generator.defaults.sampling(
        given("temperature"),
        given("top_k"),
        given("top_p"),
        given("min_p"),
        given("repetition_penalty"),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=tuple(request.logit_bias.items()),
    )
    stop = StopOptions(
        max_tokens,
        min_tokens=given("min_tokens", 0),
        strings=tuple(request.stop),
        token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
    )
    return GenerationRequest(
        await _prompt(model, request),
        sampling,
        stop,
        TextOptions(new_text=request.HasField("chat")),
        seed=given("seed"),
        cache_salt=request.cache_salt,
        grammar=_grammar(request),
        logprobs=given("logprobs"),
        prompt_logprobs=given("prompt_logprobs"),
        priority=request.priority,
        max_draft_tokens=given("max_draft_tokens"),
        draft_sources=draft_sources_from_pb(request.draft_sources),
    )


async def _prompt(model: Serving, request: gateway_pb2.GenerateRequest) -> list[int]:
    tokenizer = model.generator.tokenizer
    match request.WhichOneof("prompt"):
        case "text":
            return await encode(tokenizer, request.text)
        case "token_ids":
            return list(request.token_ids.ids)
        case "chat":
            if len(request.chat.messages) > MAX_PIECES:
                raise InvalidRequest(f"at most {MAX_PIECES} messages are allowed", param="chat.messages")
            messages = [{"role": _ROLES.get(m.role, m.role), "content": m.content} for m in request.chat.messages]
            if not messages:
                raise InvalidRequest("the conversation is empty; send at least one message", param="chat.messages")
            return await encode_chat(tokenizer, messages)
    raise InvalidRequest("set one of text, token_ids and chat", param="prompt")


def _grammar(request: gateway_pb2.GenerateRequest) -> Grammar | None:
    name = request.WhichOneof("grammar")
    return None if name is None else Grammar(GrammarKind[name.upper()], getattr(request, name))


def _logprobs(logprobs: Logprobs | None) -> gateway_pb2.TokenLogprobs | None:
    if logprobs is None:
        return None
    return gateway_pb2.TokenLogprobs(
        logprobs=logprobs.values.tolist(),
        top_count=logprobs.top_tokens.shape[1],
        top_tokens=logprobs.top_tokens.reshape(-1).tolist(),
        top_logprobs=logprobs.top_values.reshape(-1).tolist(),
    )


def _response(request_id: str, part: Part, seed: int) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=request_id,
        text=part.text,
        token_ids=part.tokens,
        finish_reason=_FINISH_REASONS[part.finish],
        prompt_tokens=part.prompt_tokens,
        completion_tokens=part.completion_tokens,
        speculation=gateway_pb2.SpeculationReport(
            steps=part.steps,
            proposed_tokens=part.verified,
            accepted_tokens=part.accepted,
            sources=[
                gateway_pb2.DraftSourceReport(
                    source=source_to_pb(source), proposed_tokens=verified, accepted_tokens=accepted
                )
                for source, (verified, accepted) in sorted(part.sources.items())
                if source
            ],
        ),
        seed=seed,
        weight_version=part.weight_version,
        cached_tokens=part.cached_tokens,
        logprobs=_logprobs(part.logprobs),
        prompt_logprobs=_logprobs(part.prompt_logprobs),
    )
