"""Heads that the target feeds: one that foretells the text must be believed, so every pairing has to be right."""

import pytest

from tests.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle, write_perfect_eagle3
from tests.invariance.engines import draft_engine, target_engine
from tests.invariance.pair import Pair, request

LENGTH = 60
PROMPTS = [[45], [40, 41, 42], [50, 5, 9, 60, 61], CYCLE[3:].tolist() * 3, [70, 71, 72, 73, 74]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(base / "target")
    write_perfect_eagle(base / "token", target, "token")
    write_perfect_eagle(base / "feature", target, "feature")
    write_perfect_eagle3(base / "eagle3", target)
    return target, {
        "token": ("EAGLE", base / "token"), "feature": ("EAGLE", base / "feature"),
        "eagle 3": ("EAGLE3", base / "eagle3"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def drafts(models):
    """One engine a head; every run leaves it empty."""
    target, heads = models
    return {name: draft_engine(algorithm, folder, target, max_running=4) for name, (algorithm, folder) in heads.items()}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("head", ["token", "feature", "eagle 3"])
def test_a_head_that_knows_is_believed(models, drafts, head, chunk, temperature):
    target = target_engine(models[0], max_step_tokens=chunk)
    todo = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(PROMPTS)]
    plain = Pair(target).run(todo)
    assert plain.tokens[0] == cycle_text(45, LENGTH)
    run = Pair(target, lambda: drafts[head], growth=8).run(todo)
    assert run.tokens == plain.tokens
    assert run.reopened == 0
    assert run.accepted > 0.97 * run.verified
    assert run.accepted > 0.7 * LENGTH * len(PROMPTS)
