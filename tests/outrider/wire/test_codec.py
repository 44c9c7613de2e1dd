"""The codec: every frame survives a round trip; frames whose arrays do not fit together are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ContextTooLong, InvalidRequest, Overloaded
from outrider.serving.features import FeatureBlock, FeatureFormat, FeatureSpec
from outrider.serving.messages import (
    DrafterStats,
    DraftStats,
    EngineLoad,
    Grammar,
    GrammarKind,
    Message,
    OnlineStats,
    OpenSession,
    SessionFailure,
    StepOutput,
)
from outrider.speculation.proposal import Commit, FinishReason, Logprobs, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire import arrays, codec
from outrider.wire.features import (
    feature_spans,
    feature_spec_from_pb,
    feature_spec_to_pb,
    features_from_pb,
    features_to_pb,
)
from outrider.wire.opens import open_to_pb, opens_from_pb
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@st.composite
def proposals(draw):
    n = draw(st.integers(0, 5))
    tokens = np.array(draw(st.lists(U32, min_size=n, max_size=n)), np.uint32)
    parents = np.array([draw(st.integers(-1, i - 1)) for i in range(n)], np.int32)
    scores = np.array(draw(st.lists(st.floats(-30, 0, width=32), min_size=n, max_size=n)), np.float32)
    return Proposal(draw(U64), draw(U32), draw(U64), tokens, parents, scores, draw(U32))


@st.composite
def commits(draw):
    tokens = np.array(draw(st.lists(U32, min_size=1, max_size=5)), np.uint32)
    reason = draw(st.sampled_from(FinishReason))
    cached = draw(st.one_of(st.just(0), U32))
    base = draw(st.integers(2, 2**20))
    reported = draw(logprobs(base, len(tokens))), draw(logprobs(1, draw(st.integers(1, min(base - 1, 5)))))
    return Commit(draw(U64), base, tokens, draw(U64), draw(U32), draw(U32), reason, cached, *reported)


@st.composite
def logprobs(draw, first, count):
    if draw(st.booleans()):
        return None
    values = np.random.default_rng(draw(U32)).standard_normal((3, count, draw(st.integers(0, 3)) + 1))
    top_tokens, top_values = (values[0, :, 1:] * 1e6).astype(np.uint32), values[1, :, 1:].astype(np.float32)
    return Logprobs(first, values[2, :, 0].astype(np.float32), top_tokens, top_values)


def same(a, b):
    assert type(a) is type(b)
    for name in a.__dataclass_fields__:
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, Logprobs):
            same(left, right)
            continue
        assert left.tolist() == right.tolist() if isinstance(left, np.ndarray) else left == right, name


def opened():
    sampling = SamplingParams(0.7, 40, 0.95, 0.05, 2**63 + 1, 0.1, -0.2, 1.3, ((5, -100.0), (6, 1 / 3)))
    stop = StopConditions(9, 2, (5, 6), True)
    grammar = Grammar(GrammarKind.REGEX, "[aä]+")
    return OpenSession(2**63, np.array([1, 2, 70000], np.uint32), 2, sampling, stop, "salt", grammar, 3, 0,
                       drafting_paused=True, priority=-3, max_draft_tokens=0)  # fmt: skip


@given(st.lists(proposals(), max_size=4), st.lists(U64, max_size=3))
def test_frames_for_the_target(items, closes):
    sent = Message(opens=[opened()], proposals=items, closes=closes)
    frame = codec.verify_request_to_pb(sent)
    got, failures = codec.verify_request_from_pb(type(frame).FromString(frame.SerializeToString()))
    assert failures == []
    assert list(got.closes) == closes
    for a, b in zip([*sent.opens, *sent.proposals], [*got.opens, *got.proposals], strict=True):
        same(a, b)


@given(st.lists(commits(), max_size=4))
def test_frames_for_the_draft_and_of_the_target(items):
    frame = codec.propose_request_to_pb(Message(commits=items))
    got, _ = codec.propose_request_from_pb(type(frame).FromString(frame.SerializeToString()))
    for a, b in zip(items, got.commits, strict=True):
        same(replace(a, logprobs=None, prompt_logprobs=None), b)  # a draft has no use for them
    drafters = (DrafterStats("NGRAM", 8, 2.5, 3, 5), DrafterStats("EAGLE3", 0, 0.0, 0))
    load = EngineLoad(1, 2, 3, 4, 5, 6, 7, "v8", 9, drafters,
                      drafting_paused=True, compilations=11, online=OnlineStats(5, 600, 2, 1, 1.5, 1.75, 3.5),
                      draft_stats=DraftStats(9, 1, 2, 3, 4, 5, 6, (7, 0, 8), 10), paused=True
                      )  # fmt: skip
    failures = [SessionFailure(7, ContextTooLong("too long", param="prompt")), SessionFailure(8, Overloaded("full"))]
    answer = codec.verify_response_from_pb(codec.verify_response_to_pb(StepOutput(items, [], failures, load)))
    assert answer.load == load
    assert [(f.session_id, type(f.error), f.error.message, f.error.param) for f in answer.failures] == [
        (7, ContextTooLong, "too long", "prompt"), (8, Overloaded, "full", None),
    ]  # fmt: skip
    for a, b in zip(items, answer.commits, strict=True):
        same(a, b)


@given(st.lists(proposals(), max_size=4))
def test_frames_of_the_draft(items):
    got = codec.propose_response_from_pb(codec.propose_response_to_pb(StepOutput(proposals=items)))
    for a, b in zip(items, got.proposals, strict=True):
        same(a, b)


def blocks(sizes):
    """Blocks of (rows, row bytes) with distinct bytes."""
    return [
        FeatureBlock(2**63 + i, 7 * i, np.arange(n * size, dtype=np.uint8).reshape(n, size) + np.uint8(i), 2**62 + i)
        for i, (n, size) in enumerate(sizes)
    ]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=4))
def test_features_cross_both_streams_as_they_are(sizes):
    sent = blocks(sizes)
    answer = codec.verify_response_from_pb(codec.verify_response_to_pb(StepOutput(features=sent)))
    message, _ = codec.propose_request_from_pb(codec.propose_request_to_pb(Message(features=sent)))
    for got in (answer.features, message.features):
        for a, b in zip(sent, got, strict=True):
            assert (a.session_id, a.first, a.spec_id) == (b.session_id, b.first, b.spec_id)
            assert np.array_equal(a.rows, b.rows)
    batch = features_to_pb(sent)
    spans = [(b.session_id, b.first, b.first + len(b.rows), b.spec_id) for b in sent]
    assert list(feature_spans(batch)) == spans


def test_blocks_that_do_not_add_up_are_refused():
    for change in ({"row_counts": b"\0\0\0\0"}, {"rows": b"12345"}, {"block_bytes": b""}, {"spec_ids": b""}):
        batch = features_to_pb(blocks([(2, 3)]))
        for name, value in change.items():
            setattr(batch, name, value)
        with pytest.raises(InvalidRequest):
            features_from_pb(batch)


def test_a_specification_has_the_same_name_on_both_sides():
    spec = FeatureSpec((1, 4), final=True, format=FeatureFormat.FLOAT8_E4M3, norm_epsilon=1e-5)
    message = feature_spec_to_pb(spec, b"fusion")
    assert feature_spec_from_pb(message) == spec
    assert message.spec_id == spec.id(b"fusion") not in (0, spec.id(b""), replace(spec, final=False).id(b"fusion"))
    message.format = 9
    with pytest.raises(InvalidRequest):
        feature_spec_from_pb(message)


def test_one_bad_open_spares_the_others():
    bad = open_to_pb(opened())
    bad.sampling.temperature = -1
    opens, failures = opens_from_pb([open_to_pb(opened()), bad])
    assert len(opens) == 1
    assert failures[0].session_id == 2**63
    assert "temperature" in failures[0].error.message


def test_a_session_replaced_by_a_refused_one_is_closed():
    bad = open_to_pb(opened())
    bad.sampling.temperature = -1
    for kind, read in (
        (target_pb2.VerifyRequest, codec.verify_request_from_pb),
        (draft_pb2.ProposeRequest, codec.propose_request_from_pb),
    ):
        message, failures = read(kind(opens=[bad], closes=np.array([5], np.uint64).tobytes()))
        assert (message.opens, message.closes, len(failures)) == ([], [5, 2**63], 1)
        message, failures = read(kind(opens=[bad, open_to_pb(opened())]))
        assert (len(message.opens), message.closes, len(failures)) == (1, [], 1)


@pytest.mark.parametrize("field", ["session_ids", "anchor_hashes", "node_counts", "parents", "log_scores"])
def test_arrays_that_do_not_fit_are_refused(field):
    node = np.zeros(1, np.uint32), np.full(1, -1, np.int32), np.zeros(1, np.float32)
    message = codec.proposals_to_pb([Proposal(1, 1, 1, *node), Proposal(2, 1, 1, *node)])
    for broken in (getattr(message, field)[:-1], getattr(message, field) * 2):
        copy = common_pb2.ProposalBatch()
        copy.CopyFrom(message)
        setattr(copy, field, broken)
        with pytest.raises(InvalidRequest):
            codec.proposals_from_pb(copy)


def test_commits_that_cannot_be_read_are_refused():
    good = codec.commits_to_pb([Commit(1, 2, np.zeros(1, np.uint32), 0, 0, 0, FinishReason.RUNNING)])
    for field, value in (("finish_reasons", b"\x09"), ("cached_counts", b""), ("tokens", b"")):
        bad = common_pb2.CommitBatch.FromString(good.SerializeToString())
        setattr(bad, field, value)
        with pytest.raises(InvalidRequest):
            codec.propose_request_from_pb(draft_pb2.ProposeRequest(commits=bad))


@pytest.mark.parametrize("parent", [0, 1, -2])
def test_a_node_before_its_parent_is_refused(parent):
    node = np.zeros(1, np.uint32), np.full(1, parent, np.int32), np.zeros(1, np.float32)
    with pytest.raises(InvalidRequest):
        codec.proposals_from_pb(codec.proposals_to_pb([Proposal(1, 1, 1, *node)]))
    two = np.zeros(2, np.uint32), np.arange(-1, 1, dtype=np.int32), np.zeros(2, np.float32)
    with pytest.raises(InvalidRequest):
        codec.proposals_from_pb(codec.proposals_to_pb([Proposal(2, 1, 1, *two), Proposal(1, 1, 1, *node)]))


def test_logprobs_that_do_not_fit_are_refused():
    reported = Logprobs(5, np.zeros(2, np.float32), np.zeros((2, 1), np.uint32), np.zeros((2, 1), np.float32))
    frame = codec.verify_response_to_pb(StepOutput([Commit(1, 5, np.array([7, 8], np.uint32), 9, logprobs=reported)]))
    assert codec.verify_response_from_pb(frame).commits[0].logprobs.first == 5
    for name, value in (
        ("commits", [1]), ("commits", [0, 0]), ("token_counts", [1]), ("top_counts", [2]), ("logprobs", [0]),
        ("top_logprobs", []),
    ):  # fmt: skip
        wrong = type(frame).FromString(frame.SerializeToString())
        setattr(wrong.logprobs, name, arrays.pack(value, arrays.U32))
        with pytest.raises(InvalidRequest):
            codec.verify_response_from_pb(wrong)
