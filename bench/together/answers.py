"""Answers of the target to prompts of all categories, with its hidden states: what drafters are replayed on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.harness.prompts import Prompt
from bench.limits.answers import recorded
from outrider.checkpoints import checkpoint
from services.draft.formats.target import read_target
from services.draft.learning.algorithms.initial import initial_head
from services.draft.learning.records.store import Record

TEMPERATURES = (0.0, 1.0)


class Answer(NamedTuple):
    """An answer to a prompt of a category."""

    category: str
    record: Record


def answers_of(model: str, head: Path, prompts: Sequence[Prompt], folder: Path, max_tokens: int) -> list[Answer]:
    """The answers to first turns at both temperatures, category by category; kept ones are not written again.

    head: whose hidden states are stored. Raises OutriderError.
    """
    states = initial_head("EAGLE3", head, read_target(checkpoint.resolve(model))).states
    store, categories = recorded(model, states, prompts, folder, max_tokens, TEMPERATURES)
    reader, order = store.read(), list(dict.fromkeys(prompt.category for prompt in prompts))
    keys = reader.entries["job"].tolist()
    found = [Answer(categories[key], reader.record(i)) for i, key in enumerate(keys) if key in categories]
    return sorted(found, key=lambda one: (one.record.temperature, order.index(one.category), one.record.seed))
