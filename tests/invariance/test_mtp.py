"""Checkpoints with MTP layers serve both target and drafter; the text equals plain decoding."""

import pytest

from outrider.serving.features import FeatureSpec
from services.draft.process.app import describe
from tests.support.checkpoints.families import FAMILIES
from tests.support.checkpoints.mtp import write_mtp
from tests.support.checkpoints.perfect import CYCLE, write_perfect_mtp
from tests.support.invariance.engines import as_on_cuda, draft_engine, target_engine
from tests.support.invariance.pair import Faults, Pair, request

KNOWN = [[45], [50, 5, 9, 60, 61], CYCLE[3:].tolist() * 3, [70, 71, 72, 73, 74]]
PROMPTS = [[5, 6, 7], list(range(30, 75)), [200], [8, 7, 8, 7, 8, 7]]
LENGTH = 24


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["deepseek-v3", "glm-4.5", "mimo", "step-3.5"])
def test_one_checkpoint_serves_target_and_drafter(tmp_path, family):
    folder = write_mtp(tmp_path / "model", family, layers=3 if family == "step-3.5" else 1)
    target = target_engine(folder, trust_remote_code=FAMILIES[family].remote, max_step_tokens=16)
    draft = draft_engine("EAGLE" if family == "mimo" else "NEXTN", None, folder, max_running=1)
    read = {"layers": (3,)} if family == "step-3.5" else {"final": True}
    assert draft.drafter.features == FeatureSpec(**read, format=draft.drafter.features.format)
    assert describe(draft, None).features.final == ("final" in read)
    for temperature in (0.0, 1.0):
        todo = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(PROMPTS)]
        plain = Pair(target).run(todo)
        broken = Faults(lost=0.1, doubled=0.2, delay=3) if family == "deepseek-v3" else Faults()
        for faults in {Faults(), broken}:
            run = Pair(target, lambda: draft, faults).run(todo)
            assert run.tokens == plain.tokens
            assert run.verified > 0


CASES = [("token", 1, ()), ("feature", 1, ()), ("feature", 3, ()), ("feature", 1, (3, 4, 5)), ("feature", 3, (3, 1, 4))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("by", "layers", "tree"), CASES)
def test_a_perfect_mtp_layer_is_accepted(tmp_path, by, layers, tree):
    """A perfect layer is accepted only if it reads the right features; so is each of several layers."""
    folder = write_perfect_mtp(tmp_path / "model", by, layers)
    draft = draft_engine("NEXTN", None, folder, max_running=1, tree=tree)
    for chunk in (16, 512):
        target = target_engine(folder, max_step_tokens=chunk)
        for i, prompt in enumerate(KNOWN):
            todo = [request(i, prompt, 1.0, LENGTH)]
            run = Pair(target, lambda: draft, draft_steps=12).run(todo)
            assert run.tokens == Pair(target).run(todo).tokens
            assert run.reopened == 0
            assert run.accepted > (0.97 if tree[1:2] != (4,) else 0.5) * run.verified
            assert run.accepted > 0.6 * LENGTH
    todo = [request(i, prompt, 1.0, LENGTH) for i, prompt in enumerate(KNOWN)]
    run = Pair(target, lambda: draft, Faults(lost=0.1, doubled=0.2, delay=2)).run(todo)
    assert run.tokens == Pair(target).run(todo).tokens
    plain, prepared = Pair(target).run(todo).tokens, as_on_cuda(target_engine(folder), prepares=True)
    for faults in (Faults(), Faults(lost=0.1, doubled=0.2, delay=2)):
        run = Pair(prepared, lambda: draft, faults, draft_steps=12).run(todo)
        assert run.tokens == plain
        assert run.verified > 0 or faults.lost  # each lost frame of hidden states opens the session again
