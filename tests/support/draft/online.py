"""Engines with online training, small enough for tests, and a pair whose draft is trained between its rounds."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np

from services.draft.formats.target import read_target
from services.draft.learning.algorithms.base import DraftShape
from services.draft.learning.algorithms.eagle3 import Eagle3
from services.draft.online.options import options_of
from tests.support.checkpoints.perfect import CYCLE, write_cyclic_target
from tests.support.invariance.engines import draft_engine
from tests.support.invariance.pair import Pair, request
from tests.support.tiny import VOCAB, write_tokenizer

SMALL = {"length": 96, "context": 32, "learnt": 64, "unroll_steps": 2, "steps": 12, "held_out": 4, "epochs": 40.0}


def write_pair(base):
    """A target with predictable text, and an untrained head."""
    target = write_tokenizer(write_cyclic_target(base / "target"))
    facts = read_target(target)
    ids = np.sort(np.concatenate([CYCLE, np.setdiff1d(np.arange(VOCAB), CYCLE)[:24]]))
    head = Eagle3(facts, DraftShape(vocab=64, inner=64))
    head.publish(head.first_params(facts, ids, np.ones(4, np.float32), 5), ids, base / "head")
    return target, base / "head"


def online_engine(head, target, small=(), **flags):
    """An engine whose learner is called by the test, with small sizes. small: sizes other than SMALL's."""
    chosen = lambda config: replace(options_of(config), **(SMALL | dict(small)))  # noqa: E731
    flags = {"max_running": 3, "online_learning_rate": 5e-3} | flags
    with mock.patch("services.draft.process.loading.options_of", chosen):
        return draft_engine("EAGLE3", head, target, online=True, **flags)


class LearningPair(Pair):
    """The learner runs a number of times after every round."""

    turns = 2

    def _round(self, now):
        super()._round(now)
        for _ in range(self.turns if self.draft is not None else 0):
            self.draft.drafter.learner.run_once()


def some_requests(number, count=6, tokens=40):
    """Sessions on the cycle, at both temperatures."""
    rng = np.random.default_rng(number)
    prompts = [CYCLE[rng.integers(len(CYCLE), size=3 + i % 3)].tolist() for i in range(count)]
    return [request(100 * number + i, prompt, float(i % 2), tokens) for i, prompt in enumerate(prompts)]
