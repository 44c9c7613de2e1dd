"""The simulated draft service."""

import numpy as np
import pytest

from bench.scale.oracle import OracleEngine, Text
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Commit, FinishReason, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions

TEXT = np.arange(100, 400, dtype=np.uint32)


def oracle(acceptance, count=8):
    engine = OracleEngine([Text(0, TEXT.tolist(), acceptance)], acceptance, 0.0, count)
    engine.open(OpenSession(1, TEXT[:10], 10, SamplingParams(), StopConditions(500)))
    return engine


def commit(start, tokens, reason=FinishReason.RUNNING):
    tokens = np.asarray(tokens, np.uint32)
    root = path_hash(np.concatenate([TEXT[:start], tokens]))
    return Commit(1, start, tokens, root, finish_reason=reason)


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_acceptance_is_as_given(acceptance):
    engine = oracle(acceptance)
    correct = []
    for start in range(10, 290):
        engine.receive((), [commit(start, TEXT[start : start + 1])])
        (proposal,) = engine.step().proposals
        assert (proposal.anchor_length, proposal.anchor_hash) == (start + 1, path_hash(TEXT[: start + 1]))
        assert proposal.parents.tolist() == list(range(-1, len(proposal.tokens) - 1))
        correct.append(bool(proposal.tokens[0] == TEXT[start + 1]))
    assert engine.idle
    assert np.mean(correct) == pytest.approx(acceptance, abs=0.1)
    assert {0.0: not any(correct), 1.0: all(correct)}.get(acceptance, True)


def test_no_proposals_after_the_end_or_for_other_texts():
    for last in (commit(10, [7]), commit(10, TEXT[10:12], FinishReason.LENGTH)):
        engine = oracle(1.0)
        engine.receive((), [last])
        assert engine.idle
