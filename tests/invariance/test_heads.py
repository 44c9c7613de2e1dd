"""Feature-based drafters: a perfect head is accepted only if each token is paired with the right features."""

import random

import pytest

from tests.support.checkpoints.blocks import write_perfect_dflash
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.perfect import (
    CYCLE,
    cycle_text,
    write_cyclic_target,
    write_perfect_eagle,
    write_perfect_eagle3,
)
from tests.support.invariance.engines import as_on_cuda, draft_engine, target_engine
from tests.support.invariance.pair import Faults, Pair, request

LENGTH = 60
PROMPTS = [[45], [40, 41, 42], [50, 5, 9, 60, 61], CYCLE[3:].tolist() * 3, [70, 71, 72, 73, 74]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    base = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(base / "target")
    write_perfect_eagle(base / "token", target, "token")
    write_perfect_eagle(base / "feature", target, "feature")
    write_perfect_eagle3(base / "eagle3", target)
    write_perfect_dflash(base / "dflash", target)
    return target, {
        "token": ("EAGLE", base / "token"), "feature": ("EAGLE", base / "feature"),
        "eagle 3": ("EAGLE3", base / "eagle3"), "dflash": ("DFLASH", base / "dflash"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def drafts(models):
    """One engine a head; every run leaves it empty."""
    target, heads = models
    return {name: draft_engine(algorithm, folder, target, max_running=4) for name, (algorithm, folder) in heads.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize("head", ["token", "feature", "eagle 3"])
def test_a_perfect_head_is_accepted(models, drafts, head, chunk, temperature):
    target = target_engine(models[0], max_step_tokens=chunk)
    requests = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(PROMPTS)]
    plain = Pair(target).run(requests)
    assert plain.tokens[0] == cycle_text(45, LENGTH)
    run = Pair(target, lambda: drafts[head], draft_steps=8).run(requests)
    assert run.tokens == plain.tokens
    assert run.reopened == 0
    assert run.accepted > 0.97 * run.verified
    assert run.accepted > 0.7 * LENGTH * len(PROMPTS)


@pytest.mark.parametrize("head", ["token", "feature", "eagle 3", "dflash"])
def test_a_perfect_head_is_accepted_where_the_device_prepares_steps(models, drafts, head):
    """It drafts ahead, a head on its own states, and its tree reaches beyond the step in flight."""
    target = as_on_cuda(target_engine(models[0]), prepares=True)
    for temperature, faults in ((1.0, Faults()), (0.0, Faults(lost=0.1, doubled=0.2, delay=2))):
        requests = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(PROMPTS)]
        plain = Pair(target_engine(models[0])).run(requests)
        run = Pair(target, lambda: drafts[head], faults, draft_steps=8).run(requests)
        assert run.tokens == plain.tokens
        if head != "dflash" and not faults.lost:  # a block reaches hardly further than the step in flight
            assert run.accepted > 0.9 * run.verified
            assert run.accepted > 0.4 * LENGTH * len(PROMPTS)


class InOrder(random.Random):
    """Every frame takes the longest time, and none is lost, doubled or overtaken."""

    def randint(self, a, b):
        return b

    def random(self):
        return 1.0

    def shuffle(self, x):
        pass


@pytest.mark.parametrize("head", ["feature", "eagle 3"])
def test_trees_that_grow_ahead_reach_over_a_delay(models, drafts, head, monkeypatch):
    """Frames take two steps of the target each way. A tree that is made once after each commit is used up by then."""
    target, one = target_engine(models[0]), [request(0, [45], 0.0, LENGTH)]
    plain, delay, depth = Pair(target).run(one), 2, 5

    def steps(*, ahead):
        monkeypatch.setattr(drafts[head].drafter, "drafts_ahead", ahead)
        pair = Pair(target, lambda: drafts[head], Faults(delay=delay), draft_steps=8)
        pair.random = pair.proposals.random = pair.commits.random = InOrder()
        run = pair.run(one)
        assert run.tokens == plain.tokens
        return run.steps

    waiting = (1 + 2 * delay) * LENGTH / (depth + 1)  # of a target that waits for each tree, in steps' time
    # The better of two runs, because the target measures modes by the real clock.
    assert min(steps(ahead=True) for _ in range(2)) < 0.6 * min(waiting, steps(ahead=False))


TREE = (3, 4, 12)
REPEATED = [cycle_text(first, 55) for first in (79, 50, 66)]  # they contain the whole cycle


def accepted(target, draft, prompts, temperature, length=LENGTH):
    """Accepted draft tokens; the text must equal plain decoding."""
    requests = [request(i, prompt, temperature, length) for i, prompt in enumerate(prompts)]
    run = Pair(target, lambda: draft, draft_steps=8).run(requests)
    assert run.tokens == Pair(target).run(requests).tokens
    return run.accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk", [16, 512])
def test_a_perfect_block_drafter_is_accepted(models, drafts, chunk, temperature):
    """Its blocks of 8 positions are accepted whole, in a batch of more sessions than it holds."""
    target = target_engine(models[0], max_step_tokens=chunk)
    requests = [request(i, prompt, temperature, LENGTH) for i, prompt in enumerate(REPEATED * 2)]
    plain = Pair(target).run(requests)
    run = Pair(target, lambda: drafts["dflash"], draft_steps=8).run(requests)
    assert run.tokens == plain.tokens
    assert run.reopened == 0
    assert run.accepted > 0.97 * run.verified
    assert run.accepted > 0.7 * LENGTH * len(requests)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ngrams_beside_a_random_head_find_repetitions(models, tmp_path, temperature):
    folder = models[0]
    random_head = write_head(tmp_path / "random_head", *eagle3(folder))
    target = target_engine(folder)

    def accepted_by(algorithm, head=None, **options):
        return accepted(target, draft_engine(algorithm, head, folder, **options), REPEATED, temperature)

    alone, ngrams = accepted_by("EAGLE3", random_head, tree=TREE), accepted_by("NGRAM")
    assert ngrams > 0.5 * LENGTH * len(REPEATED) > 5 * alone
    assert accepted_by("EAGLE3", random_head, beside=True, tree=TREE) > 0.85 * ngrams


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_beside_ngrams_predicts_new_text(models, temperature):
    folder, heads = models
    target = target_engine(folder)

    length = len(CYCLE) - 4  # no token repeats

    def accepted_by(algorithm, head=None, **options):
        return accepted(target, draft_engine(algorithm, head, folder, **options), [[45]], temperature, length)

    alone, ngrams = accepted_by(*heads["eagle 3"], tree=TREE), accepted_by("NGRAM")
    assert alone > 0.6 * length > 5 * ngrams
    assert accepted_by(*heads["eagle 3"], beside=True, tree=TREE) >= alone
