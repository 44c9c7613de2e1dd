"""Answers of the target to prompts of a benchmark, with its hidden states, kept on disk for later runs."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness.prompts import Prompt
from outrider.checkpoints import checkpoint
from outrider.config import TrainConfig
from outrider.serving.features import FeatureSpec
from services.draft.learning.records.store import Store
from services.draft.train.data.prompts import Conversation, PromptJob, jobs, read_conversations
from services.draft.train.data.writing import open_store, write_jobs

_LONGEST = 2048  # tokens of a prompt and its answer


def recorded(
    model: str, states: FeatureSpec, prompts: Sequence[Prompt], folder: Path, new: int, temperatures: Sequence[float]
) -> tuple[Store, dict[int, str]]:
    """The target's answers to first turns, and the category of each job. Missing answers are written first.

    states: of the target, that a record holds. new: maximum tokens of an answer. Raises OutriderError.
    """
    config = TrainConfig(
        model_path=model, answers=str(folder), output=str(folder / "unused"), temperature=tuple(temperatures),
        max_new_tokens=new, max_length=_LONGEST, max_running_requests=16, held_out=0.0,
    )  # fmt: skip
    target = checkpoint.resolve(model)
    wanted = _jobs(prompts, temperatures)
    store = open_store(config, target, states)
    if missing := [job for job, _ in wanted if job.key not in store.jobs]:
        asyncio.run(write_jobs(config, store, states, checkpoint.fingerprint(target), missing))
    store.close()
    return store, {job.key: category for job, category in wanted}


def _jobs(prompts: Sequence[Prompt], temperatures: Sequence[float]) -> list[tuple[PromptJob, str]]:
    """Every prompt at every temperature, with its category."""
    conversations, categories = _conversations(prompts)
    found: dict[tuple[str, float], PromptJob] = {}
    count = len(conversations) * len(temperatures)
    # Every pass over the conversations gives each of them another temperature.
    for job in itertools.islice(jobs(conversations, 0, temperatures, seed=0), count):
        found[job.conversation.name, job.temperature] = job
    return [(job, categories[job.conversation.name]) for job in found.values()]


def _conversations(prompts: Sequence[Prompt]) -> tuple[list[Conversation], dict[str, str]]:
    """Conversations of one turn, and their categories by name."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        categories = {}
        found: list[Conversation] = []
        for i, prompt in enumerate(prompts):
            file = Path(folder) / f"{i}.jsonl"
            file.write_text(json.dumps({"prompt": prompt.turns[0]}), encoding="utf-8")
            found += read_conversations([str(file)])
            categories[found[-1].name] = prompt.category
    return list({one.name: one for one in found}.values()), categories
