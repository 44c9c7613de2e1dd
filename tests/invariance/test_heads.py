"""Heads that the target feeds: one that foretells the text must be believed, so every pairing has to be right."""

import pytest

from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.perfect import (
    CYCLE,
    cycle_text,
    write_cyclic_target,
    write_perfect_eagle,
    write_perfect_eagle3,
)
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Pair, request

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


TREE = (3, 4, 12)
REPEATED = [cycle_text(first, 55) for first in (79, 50, 66)]  # behind them the cycle is known


def accepted(target, draft, prompts, temperature, length=LENGTH):
    """Tokens that hints brought; the text is as without any."""
    todo = [request(i, prompt, temperature, length) for i, prompt in enumerate(prompts)]
    run = Pair(target, lambda: draft, growth=8).run(todo)
    assert run.tokens == Pair(target).run(todo).tokens
    return run.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ngrams_beside_a_head_bring_what_it_does_not_know(models, tmp_path, temperature):
    folder = models[0]
    ignorant = write_head(tmp_path / "ignorant", *eagle3(folder))
    target = target_engine(folder)

    def brought(algorithm, head=None, **options):
        return accepted(target, draft_engine(algorithm, head, folder, **options), REPEATED, temperature)

    alone, ngrams = brought("EAGLE3", ignorant, tree=TREE), brought("NGRAM")
    assert ngrams > 0.5 * LENGTH * len(REPEATED) > 5 * alone
    assert brought("EAGLE3", ignorant, beside=True, tree=TREE) > 0.85 * ngrams


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_beside_ngrams_brings_what_they_do_not_know(models, temperature):
    folder, heads = models
    target = target_engine(folder)

    length = len(CYCLE) - 4  # nothing is said twice

    def brought(algorithm, head=None, **options):
        return accepted(target, draft_engine(algorithm, head, folder, **options), [[45]], temperature, length)

    alone, ngrams = brought(*heads["eagle 3"], tree=TREE), brought("NGRAM")
    assert alone > 0.6 * length > 5 * ngrams
    assert brought(*heads["eagle 3"], beside=True, tree=TREE) >= alone
