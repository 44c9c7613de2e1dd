"""Frames between domain types and protobuf messages. OpenSession is in opens.py, hidden states are in features.py,
packed bytes in arrays.py.

Functions raise InvalidRequest for frames whose arrays do not fit together.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import lt

from outrider.errors import InvalidRequest, from_grpc_code, grpc_code
from outrider.serving.messages import (
    DrafterStats,
    DraftStats,
    EngineLoad,
    Message,
    OnlineStats,
    SessionFailure,
    StepOutput,
)
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import Commit, FinishReason, Logprobs, Proposal
from outrider.wire.arrays import F32, I32, U8, U32, U64, concatenate, numbers_of, pack, split, unpack
from outrider.wire.features import features_from_pb, features_to_pb
from outrider.wire.opens import closes_from_pb, open_to_pb, opens_from_pb
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2

log = logging.getLogger(__name__)

# --- proposals and commits ---


def proposals_to_pb(proposals: Sequence[Proposal]) -> common_pb2.ProposalBatch:
    """A ProposalBatch message."""
    return common_pb2.ProposalBatch(
        session_ids=pack((p.session_id for p in proposals), U64),
        anchor_lengths=pack((p.anchor_length for p in proposals), U32),
        anchor_hashes=pack((p.anchor_hash for p in proposals), U64),
        node_counts=pack((len(p.tokens) for p in proposals), U32),
        tokens=concatenate([p.tokens for p in proposals], U32),
        parents=concatenate([p.parents for p in proposals], I32),
        log_scores=concatenate([p.log_scores for p in proposals], F32),
        committed_lengths=pack((p.committed_length for p in proposals), U32),
    )


def check_proposals(message: common_pb2.ProposalBatch) -> None:
    """Raise InvalidRequest for a message whose arrays do not fit together, or with a node before its parent."""
    count, rest = divmod(len(message.session_ids), U64.itemsize)
    nodes = len(message.tokens) // U32.itemsize
    sizes = (
        (rest, 0),
        (len(message.anchor_lengths), count * U32.itemsize),
        (len(message.anchor_hashes), count * U64.itemsize),
        (len(message.committed_lengths), count * U32.itemsize),
        (len(message.tokens), nodes * U32.itemsize),
        (len(message.log_scores), nodes * F32.itemsize),
    )
    if any(size != needed for size, needed in sizes):
        raise InvalidRequest("the arrays of proposals do not fit together")
    counts = numbers_of(message.node_counts, U32, count)
    above = numbers_of(message.parents, I32, nodes)
    split(counts, nodes)
    if min(above, default=-1) < -1 or not all(map(lt, above, chain.from_iterable(map(range, counts)))):
        raise InvalidRequest("a proposed draft token does not come after its parent")


def proposals_from_pb(message: common_pb2.ProposalBatch) -> list[Proposal]:
    """The proposals in a message. Raises InvalidRequest as check_proposals does."""
    check_proposals(message)
    ids = numbers_of(message.session_ids, U64)
    count = len(ids)
    tokens = unpack(message.tokens, U32)
    parents = unpack(message.parents, I32)
    log_scores = unpack(message.log_scores, F32)
    spans = split(numbers_of(message.node_counts, U32, count), len(tokens))
    columns = (
        ids,
        numbers_of(message.anchor_lengths, U32, count),
        numbers_of(message.anchor_hashes, U64, count),
        spans,
        numbers_of(message.committed_lengths, U32, count),
    )
    return [
        Proposal(session_id, length, path, tokens[span], parents[span], log_scores[span], committed_length=committed)
        for session_id, length, path, span, committed in zip(*columns, strict=True)
    ]


def commits_to_pb(commits: Sequence[Commit]) -> common_pb2.CommitBatch:
    """A CommitBatch message."""
    return common_pb2.CommitBatch(
        session_ids=pack((c.session_id for c in commits), U64),
        base_lengths=pack((c.base_length for c in commits), U32),
        token_counts=pack((len(c.tokens) for c in commits), U32),
        tokens=concatenate([c.tokens for c in commits], U32),
        root_hashes=pack((c.root_hash for c in commits), U64),
        verified_counts=pack((c.verified for c in commits), U32),
        accepted_counts=pack((c.accepted for c in commits), U32),
        finish_reasons=pack((int(c.finish_reason) for c in commits), U8),
        cached_counts=pack((c.cached_tokens for c in commits), U32),
        draft_budgets=pack((c.draft_budget for c in commits), U32),
        draft_sources=pack((c.source for c in commits), U8),
    )


def commits_from_pb(message: common_pb2.CommitBatch) -> list[Commit]:
    """The commits in a message. Raises InvalidRequest also for an unknown finish reason."""
    ids = numbers_of(message.session_ids, U64)
    count = len(ids)
    tokens = unpack(message.tokens, U32)
    try:
        reasons = [FinishReason(reason) for reason in numbers_of(message.finish_reasons, U8, count)]
    except ValueError as error:
        raise InvalidRequest(f"a commit cannot be read: {error}") from None
    columns = (
        ids,
        numbers_of(message.base_lengths, U32, count),
        split(numbers_of(message.token_counts, U32, count), len(tokens)),
        numbers_of(message.root_hashes, U64, count),
        numbers_of(message.verified_counts, U32, count),
        numbers_of(message.accepted_counts, U32, count),
        reasons,
        numbers_of(message.cached_counts, U32, count),
        numbers_of(message.draft_budgets, U32, count),
        _sources_of(message, count),
    )
    return [
        Commit(
            session_id, base, tokens[span], root, verified, accepted, reason, cached, draft_budget=wanted, source=source
        )
        for session_id, base, span, root, verified, accepted, reason, cached, wanted, source in zip(
            *columns, strict=True
        )
    ]


def _sources_of(message: common_pb2.CommitBatch, count: int) -> list[int]:
    sources = numbers_of(message.draft_sources, U8, count)
    if max(sources, default=0) > max(SourceKind):
        raise InvalidRequest(f"a commit cannot be read: draft source {max(sources)} is unknown to this version")
    return sources


CommitRow = tuple[int, int, list[int], int, int, int, int, int, int]
"""A commit: session id, base length, tokens, root hash, verified, accepted, finish reason, cached tokens, source."""


def commit_rows(batch: common_pb2.CommitBatch) -> Iterator[CommitRow]:
    """The commits in a message as tuples, for the gateway, which reads every frame and needs no objects.

    Raises InvalidRequest as commits_from_pb does, so that a draft service can read every frame that the gateway relays.
    """
    ids = numbers_of(batch.session_ids, U64)
    size = len(ids)
    tokens: list[int] = numbers_of(batch.tokens, U32)
    reasons = numbers_of(batch.finish_reasons, U8, size)
    if max(reasons, default=0) > max(FinishReason):
        raise InvalidRequest(f"a commit cannot be read: finish reason {max(reasons)} is unknown to this version")
    numbers_of(batch.draft_budgets, U32, size)
    columns = zip(
        ids,
        numbers_of(batch.base_lengths, U32, size),
        [tokens[span] for span in split(numbers_of(batch.token_counts, U32, size), len(tokens))],
        numbers_of(batch.root_hashes, U64, size),
        numbers_of(batch.verified_counts, U32, size),
        numbers_of(batch.accepted_counts, U32, size),
        reasons,
        numbers_of(batch.cached_counts, U32, size),
        _sources_of(batch, size),
        strict=True,
    )
    return iter(columns)


def logprobs_to_pb(commits: Sequence[Commit]) -> target_pb2.LogprobBatch | None:
    """A LogprobBatch message; None if no commit has any."""
    groups = [
        (place, group)
        for place, commit in enumerate(commits)
        for group in (commit.prompt_logprobs, commit.logprobs)
        if group is not None and len(group)
    ]
    if not groups:
        return None
    return target_pb2.LogprobBatch(
        commits=pack((place for place, _ in groups), U32),
        positions=pack((group.first for _, group in groups), U32),
        token_counts=pack((len(group) for _, group in groups), U32),
        top_counts=pack((group.top_tokens.shape[1] for _, group in groups), U32),
        logprobs=concatenate([group.values for _, group in groups], F32),
        top_tokens=concatenate([group.top_tokens.reshape(-1) for _, group in groups], U32),
        top_logprobs=concatenate([group.top_values.reshape(-1) for _, group in groups], F32),
    )


def logprobs_from_pb(message: target_pb2.LogprobBatch) -> list[tuple[int, Logprobs]]:
    """The groups in a message, each with the index of its commit in the frame. Raises InvalidRequest."""
    places = numbers_of(message.commits, U32)
    size = len(places)
    counts, tops = numbers_of(message.token_counts, U32, size), numbers_of(message.top_counts, U32, size)
    values, top_tokens = unpack(message.logprobs, F32), unpack(message.top_tokens, U32)
    top_values = unpack(message.top_logprobs, F32, len(top_tokens))
    columns = zip(
        places,
        numbers_of(message.positions, U32, size),
        tops,
        split(counts, len(values)),
        split([count * top for count, top in zip(counts, tops, strict=True)], len(top_tokens)),
        strict=True,
    )
    groups = []
    for place, first, top, own, best in columns:
        shape = (own.stop - own.start, top)
        group = Logprobs(first, values[own], top_tokens[best].reshape(shape), top_values[best].reshape(shape))
        groups.append((place, group))
    return groups


# --- frames ---


def load_to_pb(load: EngineLoad) -> common_pb2.EngineLoad:
    """An EngineLoad message."""
    return common_pb2.EngineLoad(
        running_sessions=load.running_sessions,
        waiting_sessions=load.waiting_sessions,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        step_microseconds=load.step_microseconds,
        step_tokens=load.step_tokens,
        cached_pages=load.cached_pages,
        weight_version=load.weight_version,
        preemptions=load.preemptions,
        compilations=load.compilations,
        drafters=[
            common_pb2.DrafterStats(
                name=d.name, offered=d.offered, promised=d.promised, accepted=d.accepted, chances=d.chances
            )
            for d in load.drafters
        ],
        drafting_paused=load.drafting_paused,
        online=common_pb2.OnlineStats(**vars(load.online)) if load.online is not None else None,
        draft_stats=common_pb2.DraftStats(**vars(load.draft_stats)) if load.draft_stats is not None else None,
        paused=load.paused,
    )


def load_from_pb(message: common_pb2.EngineLoad) -> EngineLoad:
    """The EngineLoad of a message."""
    return EngineLoad(
        message.running_sessions,
        message.waiting_sessions,
        message.free_pages,
        message.total_pages,
        message.step_microseconds,
        message.step_tokens,
        message.cached_pages,
        message.weight_version,
        message.preemptions,
        tuple(DrafterStats(d.name, d.offered, d.promised, d.accepted, d.chances) for d in message.drafters),
        message.drafting_paused,
        message.compilations,
        _online_from_pb(message.online) if message.HasField("online") else None,
        _draft_stats_from_pb(message.draft_stats) if message.HasField("draft_stats") else None,
        message.paused,
    )


def _online_from_pb(message: common_pb2.OnlineStats) -> OnlineStats:
    return OnlineStats(
        message.steps,
        message.rows,
        message.kept,
        message.rejected,
        message.accept_length_before,
        message.accept_length_after,
        message.seconds,
    )


def _draft_stats_from_pb(message: common_pb2.DraftStats) -> DraftStats:
    return DraftStats(
        message.received_tokens,
        message.unverified_tokens,
        message.steps_without_drafter,
        message.steps_paused,
        message.steps_late,
        message.steps_empty,
        message.steps_not_selected,
        tuple(message.lag_histogram),
        message.lag_tokens,
    )


def _failures_to_pb(failures: Sequence[SessionFailure]) -> list[common_pb2.SessionError]:
    return [
        common_pb2.SessionError(
            session_id=f.session_id, code=grpc_code(f.error), message=f.error.message, param=f.error.param or ""
        )
        for f in failures
    ]


def failure_from_pb(message: common_pb2.SessionError) -> SessionFailure:
    """The SessionFailure of a message."""
    error = from_grpc_code(message.code, message.message)
    error.param = message.param or None
    return SessionFailure(message.session_id, error)


def verify_request_to_pb(message: Message) -> target_pb2.VerifyRequest:
    """A frame for the target."""
    return target_pb2.VerifyRequest(
        opens=[open_to_pb(request) for request in message.opens],
        proposals=proposals_to_pb(message.proposals) if message.proposals else None,
        closes=pack(message.closes, U64),
    )


def verify_request_from_pb(frame: target_pb2.VerifyRequest) -> tuple[Message, list[SessionFailure]]:
    """The content of a frame for the target. Malformed proposals are dropped, because they must not end the stream."""
    opens, failures = opens_from_pb(frame.opens)
    closes = closes_from_pb(frame.closes, opens, failures)
    try:
        proposals = proposals_from_pb(frame.proposals)
    except InvalidRequest as error:
        log.warning("proposals were dropped: %s", error.message)
        proposals = []
    return Message(opens=opens, proposals=proposals, closes=closes), failures


def verify_response_to_pb(output: StepOutput) -> target_pb2.VerifyResponse:
    """A frame of the target."""
    return target_pb2.VerifyResponse(
        commits=commits_to_pb(output.commits),
        errors=_failures_to_pb(output.failures),
        load=load_to_pb(output.load),
        logprobs=logprobs_to_pb(output.commits),
        features=features_to_pb(output.features) if output.features else None,
    )


def verify_response_from_pb(frame: target_pb2.VerifyResponse) -> StepOutput:
    """The content of a frame of the target."""
    commits = commits_from_pb(frame.commits)
    for place, group in logprobs_from_pb(frame.logprobs):
        if place >= len(commits):
            raise InvalidRequest("log-probabilities belong to a commit that is not in their frame")
        commit = commits[place]
        prompt = group.first < commit.base_length
        commits[place] = replace(commit, prompt_logprobs=group) if prompt else replace(commit, logprobs=group)
    return StepOutput(
        commits=commits,
        features=features_from_pb(frame.features),
        failures=[failure_from_pb(error) for error in frame.errors],
        load=load_from_pb(frame.load),
    )


def propose_request_to_pb(message: Message) -> draft_pb2.ProposeRequest:
    """A frame for the draft service."""
    return draft_pb2.ProposeRequest(
        opens=[open_to_pb(request) for request in message.opens],
        commits=commits_to_pb(message.commits) if message.commits else None,
        closes=pack(message.closes, U64),
        features=features_to_pb(message.features) if message.features else None,
    )


def propose_request_from_pb(frame: draft_pb2.ProposeRequest) -> tuple[Message, list[SessionFailure]]:
    """The content of a frame for the draft service."""
    opens, failures = opens_from_pb(frame.opens)
    closes = closes_from_pb(frame.closes, opens, failures)
    commits = commits_from_pb(frame.commits)
    features = features_from_pb(frame.features) if frame.HasField("features") else []
    return Message(opens=opens, commits=commits, closes=closes, features=features), failures


def propose_response_to_pb(output: StepOutput) -> draft_pb2.ProposeResponse:
    """A frame of the draft service."""
    return draft_pb2.ProposeResponse(
        proposals=proposals_to_pb(output.proposals),
        errors=_failures_to_pb(output.failures),
        load=load_to_pb(output.load),
    )


def propose_response_from_pb(frame: draft_pb2.ProposeResponse) -> StepOutput:
    """The content of a frame of the draft service."""
    return StepOutput(
        proposals=proposals_from_pb(frame.proposals),
        failures=[failure_from_pb(error) for error in frame.errors],
        load=load_from_pb(frame.load),
    )
