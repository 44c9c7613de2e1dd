"""Frames of both streams: decoded by either end, or refused with InvalidRequest, and merged into draft trees.

What the gateway reads without decoding must be refused exactly where the services would refuse it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from outrider.errors import InvalidRequest
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from outrider.speculation.tree import SpeculationTree
from outrider.transport.frame_socket import message_of
from outrider.wire import codec
from outrider.wire.features import feature_spans, features_from_pb
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2
from tests.fuzz.choices import Choices

_ARRAYS = ("session_ids", "anchor_lengths", "anchor_hashes", "node_counts", "tokens", "parents", "log_scores",
           "committed_lengths", "base_lengths", "token_counts", "root_hashes", "verified_counts", "accepted_counts",
           "finish_reasons", "cached_counts", "draft_budgets", "draft_sources", "first_positions", "row_counts",
           "block_bytes", "rows", "spec_ids", "commits", "positions", "top_counts", "logprobs", "top_tokens",
           "top_logprobs")  # fmt: skip
_EIGHT = ("session_ids", "anchor_hashes", "root_hashes", "spec_ids")
_ONE = ("finish_reasons", "draft_sources", "rows")
_PROMPT = np.arange(4, dtype=np.uint32)


def fuzz(data: bytes) -> None:
    """The first byte chooses the frame, and whether the rest is its bytes or decisions about its arrays."""
    choices = Choices(data)
    kind, check = choices.one(_FRAMES)
    if choices.chance(2):
        frame = kind()
        _fill(frame, choices)
    else:
        try:
            frame = message_of(kind, choices.rest())
        except InvalidRequest:
            return
    check(frame)


def seeds() -> list[bytes]:
    """One good frame of each kind."""
    nodes = np.array([5, 6, 7], np.uint32), np.array([-1, 0, 0], np.int32), np.zeros(3, np.float32)
    proposals = codec.proposals_to_pb([Proposal(1, 4, 9, *nodes, committed_length=4)])
    commits = codec.commits_to_pb([Commit(1, 4, np.array([8], np.uint32), 3, 2, 1, FinishReason.RUNNING)])
    frames = [
        target_pb2.VerifyRequest(proposals=proposals), target_pb2.VerifyResponse(commits=commits),
        draft_pb2.ProposeRequest(commits=commits), draft_pb2.ProposeResponse(proposals=proposals),
    ]  # fmt: skip
    return [bytes((index, 0)) + frame.SerializeToString() for index, frame in enumerate(frames)] + [
        bytes((index, 1, *range(40))) for index in range(len(frames))
    ]


def _fill(message: Any, choices: Choices) -> None:
    """Give a message arrays of nearly matching lengths."""
    count = choices.below(4)
    for field in message.DESCRIPTOR.fields:
        if choices.chance(8):
            continue
        if field.name in _ARRAYS and field.type == field.TYPE_BYTES:
            size = 8 if field.name in _EIGHT else 1 if field.name in _ONE else 4
            numbers = [choices.below(4) if not choices.chance(8) else choices.integer() for _ in range(count)]
            content = b"".join((number % 256**size).to_bytes(size, "little") for number in numbers)
            setattr(message, field.name, content if not choices.chance(16) else choices.take(9))
        elif field.type == field.TYPE_MESSAGE:
            held = getattr(message, field.name)
            _fill(held.add() if field.is_repeated else held, choices)
        elif not field.is_repeated:
            _set(message, field, choices)


def _set(message: Any, field: Any, choices: Choices) -> None:
    with contextlib.suppress(ValueError, OverflowError):  # beyond the field's type
        if field.type in (field.TYPE_STRING, field.TYPE_BYTES):
            setattr(message, field.name, choices.text() if field.type == field.TYPE_STRING else choices.take(12))
        elif field.type in (field.TYPE_FLOAT, field.TYPE_DOUBLE):
            setattr(message, field.name, choices.number())
        else:
            setattr(message, field.name, choices.integer())


def _outcome(read: Callable[[], Any]) -> Any:
    """What a reader returns; None if it refuses the message."""
    try:
        return read()
    except InvalidRequest:
        return None


def _same(one: Any, other: Any, what: str) -> None:
    if (one is None) != (other is None):
        raise AssertionError(f"one reader of {what} refuses what the other takes")


def _merged(proposals: list[Proposal]) -> None:
    tree = SpeculationTree(_PROMPT, capacity=16)
    for proposal in proposals:
        tree.merge(proposal)
        tree.select(8, 4, 4)
    assert len(tree) <= 16, "a tree has grown beyond its capacity"


def _verify_request(frame: target_pb2.VerifyRequest) -> None:
    decoded = _outcome(lambda: codec.verify_request_from_pb(frame))
    if decoded is not None:
        _merged(decoded[0].proposals)
        codec.verify_request_to_pb(decoded[0])


def _propose_request(frame: draft_pb2.ProposeRequest) -> None:
    decoded = _outcome(lambda: codec.propose_request_from_pb(frame))
    if decoded is not None:
        codec.propose_request_to_pb(decoded[0])


def _commits(batch: common_pb2.CommitBatch) -> None:
    _same(_outcome(lambda: codec.commits_from_pb(batch)), _outcome(lambda: list(codec.commit_rows(batch))), "commits")


def _features(batch: common_pb2.FeatureBatch) -> None:
    _same(_outcome(lambda: features_from_pb(batch)), _outcome(lambda: list(feature_spans(batch))), "features")


def _verify_response(frame: target_pb2.VerifyResponse) -> None:
    _commits(frame.commits)
    _features(frame.features)
    decoded = _outcome(lambda: codec.verify_response_from_pb(frame))
    if decoded is not None:
        codec.verify_response_to_pb(decoded)


def _propose_response(frame: draft_pb2.ProposeResponse) -> None:
    whole = _outcome(lambda: codec.proposals_from_pb(frame.proposals))
    _same(whole, _outcome(lambda: codec.check_proposals(frame.proposals) or True), "proposals")
    if whole is not None:
        _merged(whole)
    decoded = _outcome(lambda: codec.propose_response_from_pb(frame))
    if decoded is not None:
        codec.propose_response_to_pb(decoded)


_FRAMES: tuple[tuple[Any, Callable[[Any], None]], ...] = (
    (target_pb2.VerifyRequest, _verify_request),
    (target_pb2.VerifyResponse, _verify_response),
    (draft_pb2.ProposeRequest, _propose_request),
    (draft_pb2.ProposeResponse, _propose_response),
)
