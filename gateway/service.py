"""The gRPC edge: GatewayService, on the same sessions as REST."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import outrider
from gateway.facts import Facts
from gateway.generation import GenerationRequest, Generator, Part
from outrider.errors import InvalidRequest
from outrider.serving.rpc import statuses
from outrider.speculation.sampling import SamplingParams
from outrider.wire.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """Generate and GetGatewayInfo."""

    def __init__(self, generator: Generator, facts: Facts) -> None:
        self._generator = generator
        self._facts = facts

    async def GetGatewayInfo(  # noqa: N802
        self, request: gateway_pb2.GetGatewayInfoRequest, context: Any
    ) -> gateway_pb2.GetGatewayInfoResponse:
        """Facts about the model that is served."""
        del request, context
        drafts = [link.info for link in self._generator.orchestrator.drafts if link.up and link.info is not None]
        return gateway_pb2.GetGatewayInfoResponse(
            software_version=outrider.__version__,
            served_model_name=self._generator.name,
            model=self._facts.target.model,
            drafters=sorted({name for info in drafts for name in info.drafters}),
            max_session_tokens=self._generator.max_session_tokens,
        )

    async def Generate(  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Stream the parts of one generation."""
        request_id = f"gen-{secrets.token_hex(12)}"
        async with statuses(context):
            wanted = self._request(request)
            session = self._generator.prepare(wanted)
            async with aclosing(self._generator.run(session, wanted.stops)) as parts:  # type: ignore[type-var]
                async for part in parts:
                    yield _response(request_id, part)

    def _request(self, request: gateway_pb2.GenerateRequest) -> GenerationRequest:
        """Raises InvalidRequest, ModelNotFound."""

        def given(name: str, default: Any = None) -> Any:
            return getattr(request, name) if request.HasField(name) else default

        self._generator.check_model(request.model)
        max_tokens = given("max_tokens")
        if max_tokens == 0:
            raise InvalidRequest("max_tokens must be 1 or more", param="max_tokens")
        sampling = SamplingParams(
            given("temperature", 1.0), given("top_k", 0), given("top_p", 1.0), given("min_p", 0.0)
        )
        return GenerationRequest(
            self._prompt(request),
            sampling,
            max_tokens,
            given("min_tokens", 0),
            given("seed"),
            tuple(request.stop),
            tuple(request.stop_token_ids),
            request.ignore_eos,
        )

    def _prompt(self, request: gateway_pb2.GenerateRequest) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return self._generator.tokenizer.encode(request.text)
            case "token_ids":
                return list(request.token_ids.ids)
            case "chat":
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return self._generator.tokenizer.encode_chat(messages)
        raise InvalidRequest("set one of text, token_ids and chat", param="prompt")


def _response(request_id: str, part: Part) -> gateway_pb2.GenerateResponse:
    return gateway_pb2.GenerateResponse(
        request_id=request_id,
        text=part.text,
        token_ids=part.tokens,
        finish_reason=common_pb2.FinishReason.Name(int(part.finish)),
        prompt_tokens=part.prompt_tokens,
        completion_tokens=part.completion_tokens,
        speculation=gateway_pb2.SpeculationReport(
            steps=part.steps, proposed_tokens=part.verified, accepted_tokens=part.accepted
        ),
        seed=part.seed,
    )
