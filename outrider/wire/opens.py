"""OpenSession between domain type and protobuf message. Raises InvalidRequest for parameters out of range."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind, OpenSession, SessionFailure
from outrider.speculation.draft_source import ALL_SOURCES, SourceKind
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire.arrays import F64, U32, U64, numbers_of, pack, unpack
from outrider.wire.v1 import common_pb2


def open_to_pb(request: OpenSession) -> common_pb2.OpenSession:
    """An OpenSession message."""
    stop = request.stop
    return common_pb2.OpenSession(
        session_id=request.session_id,
        tokens=pack(request.tokens, U32),
        prompt_length=request.prompt_length,
        sampling=_sampling_to_pb(request.sampling),
        stop=common_pb2.StopConditions(
            max_tokens=stop.max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=stop.stop_token_ids,
            ignore_eos=stop.ignore_eos,
        ),
        cache_salt=request.cache_salt,
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        feature_spec=request.feature_spec,
        features_from=request.features_from,
        drafting_paused=request.drafting_paused,
        grammar=_grammar_to_pb(request.grammar),
        priority=request.priority,
        max_draft_tokens=request.max_draft_tokens,
        traceparent=request.traceparent,
        draft_sources=draft_sources_to_pb(request.draft_sources),
        caller=request.caller,
        scaled_logprobs=request.scaled_logprobs,
    )


def open_from_pb(message: common_pb2.OpenSession) -> OpenSession:
    """The OpenSession of a message. Raises InvalidRequest for parameters out of range."""
    stop = message.stop
    return OpenSession(
        session_id=message.session_id,
        tokens=unpack(message.tokens, U32),
        prompt_length=message.prompt_length,
        sampling=_sampling_from_pb(message.sampling),
        stop=StopConditions(stop.max_tokens, stop.min_tokens, tuple(stop.stop_token_ids), stop.ignore_eos),
        cache_salt=message.cache_salt,
        grammar=_grammar_from_pb(message.grammar) if message.HasField("grammar") else None,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        feature_spec=message.feature_spec,
        features_from=message.features_from,
        drafting_paused=message.drafting_paused,
        priority=message.priority,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
        traceparent=message.traceparent,
        draft_sources=draft_sources_from_pb(message.draft_sources),
        caller=message.caller,
        scaled_logprobs=message.scaled_logprobs,
    )


def draft_sources_to_pb(sources: Collection[SourceKind]) -> list[str]:
    """The sources that may draft, as a field in which empty allows all."""
    return [] if len(sources) == len(ALL_SOURCES) else [source_to_pb(source) for source in sorted(sources)]


def source_to_pb(source: int) -> str:
    """One source."""
    return common_pb2.DraftSource.Name(source)


def draft_sources_from_pb(values: Iterable[int]) -> frozenset[SourceKind]:
    """The sources that may draft. Raises InvalidRequest for one that is unknown."""
    try:
        return frozenset(map(SourceKind, values)) or ALL_SOURCES
    except ValueError as error:
        message = f"draft_sources: {error} of this version"
        raise InvalidRequest(message, param="draft_sources") from None


def _grammar_to_pb(grammar: Grammar | None) -> common_pb2.Grammar | None:
    if grammar is None:
        return None
    return common_pb2.Grammar(kind=common_pb2.GrammarKind.Name(int(grammar.kind)), text=grammar.text)


def _grammar_from_pb(message: common_pb2.Grammar) -> Grammar:
    try:
        return Grammar(GrammarKind(message.kind), message.text)
    except ValueError:
        raise InvalidRequest(f"grammar kind {message.kind} is unknown to this version", param="grammar") from None


def _sampling_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        bias_tokens=pack((token for token, _ in params.logit_bias), U32),
        bias_values=pack((bias for _, bias in params.logit_bias), F64),
    )


def _sampling_from_pb(message: common_pb2.SamplingParams) -> SamplingParams:
    biased = numbers_of(message.bias_tokens, U32)
    return SamplingParams(
        message.temperature,
        message.top_k,
        message.top_p,
        message.min_p,
        message.seed,
        message.presence_penalty,
        message.frequency_penalty,
        message.repetition_penalty or 1.0,
        tuple(zip(biased, numbers_of(message.bias_values, F64, len(biased)), strict=True)),
    )


def opens_from_pb(
    messages: Iterable[common_pb2.OpenSession],
) -> tuple[list[OpenSession], list[SessionFailure]]:
    """The sessions to open, and the failures of those with parameters out of range."""
    opens: list[OpenSession] = []
    failures: list[SessionFailure] = []
    for message in messages:
        try:
            opens.append(open_from_pb(message))
        except InvalidRequest as error:
            failures.append(SessionFailure(message.session_id, error))
    return opens, failures


def closes_from_pb(ids: bytes, opens: Iterable[OpenSession], failures: Iterable[SessionFailure]) -> list[int]:
    """Sessions to close: those of a frame, and those that a failed open was to replace."""
    opened = {request.session_id for request in opens}
    return [*numbers_of(ids, U64), *(f.session_id for f in failures if f.session_id not in opened)]
