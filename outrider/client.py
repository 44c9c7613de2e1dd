"""A Python client of the gateway's gRPC service, blocking and asynchronous.

    with Client("127.0.0.1:30001") as client:
        for part in client.generate("Once upon a time", max_tokens=64):
            print(part.text, end="", flush=True)

A prompt is a text, a list of token ids, or a conversation: a list of messages such as
{"role": "user", "content": "Hello"}. Leaving a loop over parts early cancels the generation. Errors of the gateway are
raised as OutriderError: InvalidRequest, ModelNotFound, ContextTooLong, Overloaded, Unavailable, ... If a retry may
succeed, their `retry_after` has the seconds to wait.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import grpc

from outrider.errors import InvalidRequest, OutriderError, from_grpc_code
from outrider.speculation.draft_source import SOURCES_BY_LABEL, SourceKind
from outrider.tls import ClientTls, open_blocking_channel, open_channel
from outrider.wire.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
FinishReason = Literal["stop", "length", "abort"]

_FINISH_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_ABORT: "abort",
}
_CHANNEL_OPTIONS = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]


class Options(TypedDict, total=False):
    """Options of a generation; options that are left out have the gateway's default."""

    model: str
    """Name of the model; "default" is the served one, of several the first."""
    max_tokens: int
    """Maximum number of new tokens; by default the rest of the context."""
    min_tokens: int
    """Minimum number of new tokens before a stop token can be sampled."""
    temperature: float
    """Divisor of the logits; 0 is greedy; 1 by default."""
    top_k: int
    """Number of most likely tokens kept; 0 keeps all."""
    top_p: float
    """Probability mass kept, in (0, 1]."""
    min_p: float
    """Minimum probability kept, relative to the most likely token, in [0, 1]."""
    seed: int
    """Seed of the noise; the same seed gives the same text."""
    stop: str | Sequence[str]
    """One or several texts that end the generation and are not part of the answer."""
    stop_token_ids: Sequence[int]
    """Token ids that end the generation."""
    ignore_eos: bool
    """True if the model's own end-of-sequence ids do not end the generation."""
    cache_salt: str
    """Salt of the prefix cache: only requests with equal salts share cached pages."""
    presence_penalty: float
    """Subtracted from the logit of a token that occurs in the answer so far."""
    frequency_penalty: float
    """Subtracted from a token's logit for each of its occurrences in the answer so far."""
    repetition_penalty: float
    """Divides positive logits, and multiplies others, of tokens in the prompt or the answer so far; 1 is off."""
    logit_bias: Mapping[int, float]
    """Bias added to logits, by token id."""
    logprobs: int
    """Number of most likely tokens reported with the log-probability of each new token, at most 20."""
    prompt_logprobs: int
    """The same for the prompt's tokens except the first."""
    json_schema: str
    """JSON schema, as JSON, that the answer must satisfy."""
    regex: str
    """Regular expression that the answer must match."""
    ebnf: str
    """Grammar that the answer must match, in Lark's or GBNF's notation. Only one of the three can be sent."""
    max_draft_tokens: int
    """Maximum number of draft tokens that a step verifies; 0 is plain decoding. The text is the same in any case."""
    draft_sources: Sequence[str]
    """Draft sources that may draft: "draft" (the draft service), "lookup", "head", "quantized"; empty allows none."""
    priority: int
    """Priority of a waiting request: lower numbers are admitted first."""


@dataclass(frozen=True)
class Speculation:
    """Speculation of a generation: verification steps, verified draft tokens and accepted draft tokens.

    sources: verified and accepted draft tokens of each draft source that had some
    """

    steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of tokens from the model at temperature 1, before penalties, grammar and filters.

    logprobs: of the tokens. top: for each token, the most likely tokens at its position with theirs, best first
    """

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """A part of an answer.

    text, token_ids: text and tokens that this part adds
    finish_reason: only in the last part
    completion_tokens, speculation: of all parts so far
    logprobs: of token_ids, if requested
    prompt_logprobs: of the prompt's tokens except the first, if requested; only in the first part
    cached_tokens: prompt tokens that the prefix cache supplied
    seed: of the noise; sending it again gives the same text
    weight_version: label of the weights that computed this part
    """

    request_id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    speculation: Speculation
    seed: int
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    weight_version: str = ""


@dataclass(frozen=True)
class Answer:
    """A whole answer. Fields as in Part."""

    request_id: str
    text: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    seed: int
    token_ids: list[int] = field(default_factory=list)
    speculation: Speculation = field(default_factory=Speculation)
    cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None
    weight_version: str = ""

    @property
    def accept_length(self) -> float:
        """Tokens committed per verification step, bonus included; 1 is plain decoding."""
        return len(self.token_ids) / self.speculation.steps if self.speculation.steps else 0.0


@dataclass(frozen=True)
class GatewayInfo:
    """Facts about a served model. max_session_tokens: maximum length of prompt and answer together.

    served_models: names of all models of the gateway; the first one serves requests without a name
    """

    software_version: str
    served_model_name: str
    architecture: str
    vocab_size: int
    drafters: list[str]
    max_session_tokens: int
    served_models: list[str] = field(default_factory=list)


class Client:
    """Blocking client. Use as a context manager, or call `close`. Safe to share between threads."""

    def __init__(self, address: str, api_key: str | None = None, *, tls: ClientTls | None = None) -> None:
        """address: of the gateway's gRPC service, "host:port" or "unix:/path". api_key: if it needs one.

        tls: from `outrider.tls.client_tls`, if the port has TLS
        """
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        self._channel = open_blocking_channel(address, _CHANNEL_OPTIONS, tls)
        self._stub: Any = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and cancel running generations."""
        self._channel.close()

    def info(self, timeout: float | None = 10.0, *, model: str = "") -> GatewayInfo:
        """Facts about a served model. timeout: seconds. model: by default the first one. Raises OutriderError."""
        request = gateway_pb2.GetGatewayInfoRequest(model=model)
        try:
            return _info(self._stub.GetGatewayInfo(request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise _outrider_error(error) from error

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Iterator[Part]:
        """Generate an answer, in parts as they are committed. timeout: for the whole, in seconds. Raises
        OutriderError."""
        call = self._stub.Generate(_request(prompt, options), timeout=timeout, metadata=self._metadata)
        try:
            for message in call:
                yield _part(message)
        except grpc.RpcError as error:
            raise _outrider_error(error) from error
        finally:
            call.cancel()

    def complete(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Answer:
        """Generate a whole answer. timeout: seconds. Raises OutriderError."""
        return _answer(list(self.generate(prompt, timeout=timeout, **options)))


class AsyncClient:
    """Asynchronous client. Use as an async context manager, or call `close`. Belongs to one event loop."""

    def __init__(self, address: str, api_key: str | None = None, *, tls: ClientTls | None = None) -> None:
        """address: of the gateway's gRPC service, "host:port" or "unix:/path". api_key: if it needs one.

        tls: from `outrider.tls.client_tls`, if the port has TLS
        """
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key is not None else ()
        self._channel = open_channel(address, _CHANNEL_OPTIONS, tls)
        self._stub: Any = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection and cancel running generations."""
        await self._channel.close()

    async def info(self, timeout: float | None = 10.0, *, model: str = "") -> GatewayInfo:  # noqa: ASYNC109
        """Facts about a served model. timeout: seconds. model: by default the first one. Raises OutriderError."""
        request = gateway_pb2.GetGatewayInfoRequest(model=model)
        try:
            return _info(await self._stub.GetGatewayInfo(request, timeout=timeout, metadata=self._metadata))
        except grpc.aio.AioRpcError as error:
            raise _outrider_error(error) from error

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> AsyncIterator[Part]:
        """Generate an answer, in parts as they are committed. timeout: for the whole, in seconds. Raises
        OutriderError."""
        call = self._stub.Generate(_request(prompt, options), timeout=timeout, metadata=self._metadata)
        try:
            async for message in call:
                yield _part(message)
        except grpc.aio.AioRpcError as error:
            raise _outrider_error(error) from error
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> Answer:
        """Generate a whole answer. timeout: seconds. Raises OutriderError."""
        return _answer([part async for part in self.generate(prompt, timeout=timeout, **options)])


def _request(prompt: Prompt, options: Options) -> gateway_pb2.GenerateRequest:
    if len(options.keys() & {"json_schema", "regex", "ebnf"}) > 1:
        raise InvalidRequest("only one of json_schema, regex and ebnf can be sent", param="regex")
    if isinstance(stop := options.get("stop"), str):  # a repeated field would take each character for a text
        options = {**options, "stop": [stop]}
    if (sources := options.get("draft_sources")) is not None:
        options = {**options, **_allowing(sources)}  # type: ignore[typeddict-item]
    request = gateway_pb2.GenerateRequest(**options)
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, Mapping) for item in prompt) and prompt:
        for item in prompt:
            assert isinstance(item, Mapping)
            request.chat.messages.add(role=item["role"], content=item["content"])
    elif all(isinstance(item, Integral) for item in prompt):  # includes NumPy's integers
        request.token_ids.ids.extend(map(int, prompt))  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    else:
        raise InvalidRequest("a prompt is a text, a list of token ids, or a list of messages", param="prompt")
    return request


def _allowing(labels: Sequence[str]) -> dict[str, Any]:
    """The fields of a request that allow some draft sources."""
    if unknown := [label for label in labels if label not in SOURCES_BY_LABEL]:
        message = f"{unknown[0]!r} is no draft source; name some of {', '.join(SOURCES_BY_LABEL)}"
        raise InvalidRequest(message, param="draft_sources")
    none: dict[str, Any] = {} if labels else {"max_draft_tokens": 0}
    return {"draft_sources": [int(SOURCES_BY_LABEL[label]) for label in labels], **none}


def _part(message: gateway_pb2.GenerateResponse) -> Part:
    speculation = message.speculation
    return Part(
        message.request_id,
        message.text,
        list(message.token_ids),
        _FINISH_REASONS.get(message.finish_reason),
        message.prompt_tokens,
        message.completion_tokens,
        Speculation(
            speculation.steps,
            speculation.proposed_tokens,
            speculation.accepted_tokens,
            {SourceKind(one.source).label: (one.proposed_tokens, one.accepted_tokens) for one in speculation.sources},
        ),
        message.seed,
        message.cached_tokens,
        _logprobs(message.logprobs) if message.HasField("logprobs") else None,
        _logprobs(message.prompt_logprobs) if message.HasField("prompt_logprobs") else None,
        message.weight_version,
    )


def _logprobs(message: gateway_pb2.TokenLogprobs) -> TokenLogprobs:
    pairs = list(zip(message.top_tokens, message.top_logprobs, strict=True))
    size = message.top_count
    return TokenLogprobs(
        list(message.logprobs), [pairs[i * size : (i + 1) * size] for i in range(len(message.logprobs))]
    )


def _answer(parts: Sequence[Part]) -> Answer:
    if not parts:
        raise OutriderError("the gateway ended the answer without a part")
    last = parts[-1]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return Answer(
        last.request_id,
        "".join(part.text for part in parts),
        last.finish_reason,
        last.prompt_tokens,
        last.seed,
        [token for part in parts for token in part.token_ids],
        last.speculation,
        last.cached_tokens,
        TokenLogprobs([p for one in logprobs for p in one.logprobs], [t for one in logprobs for t in one.top])
        if logprobs
        else None,
        parts[0].prompt_logprobs,
        last.weight_version,
    )


def _info(message: gateway_pb2.GetGatewayInfoResponse) -> GatewayInfo:
    return GatewayInfo(
        message.software_version,
        message.served_model_name,
        message.model.architecture,
        message.model.vocab_size,
        list(message.drafters),
        message.max_session_tokens,
        list(message.served_models),
    )


def _outrider_error(error: Any) -> OutriderError:
    """The error of a failed call. A status of gRPC itself, such as an exceeded deadline, is named in the message."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or ""
    found = from_grpc_code(int(code.value[0]), details or code.name.lower().replace("_", " "))
    seconds = dict(error.trailing_metadata() or ()).get("retry-after", "")
    found.retry_after = int(seconds) if str(seconds).isdigit() else None
    return found
