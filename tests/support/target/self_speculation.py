"""Engines that speculate with draft sources of their own, and observers of what these sources do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.config import TargetConfig
from outrider.speculation.sampling import log_softmax, sample
from services.target.engine.engine import TargetEngine
from services.target.model.base import Model
from services.target.speculation.modes.mode import SpeculationMode
from services.target.step.programs import LoopIteration
from tests.support.target.driving import load_model
from tests.support.tiny import VOCAB

LAYERS = [-1, 0, 1]  # the layers whose outputs a head reads, of a target of two layers; -1 is the embedding
LONG = 60.0  # coalescing window in seconds that never ends within a test: a program runs as many steps as it may


def with_head(target: Path, folder: Path, **flags) -> Model:
    """A target with a local EAGLE head."""
    return load_model(target, self_speculation="head", self_speculation_head=str(folder), **flags)


def self_speculating(model: Model, **flags) -> TargetEngine:
    """An engine that drafts with its own sources where they are predicted to pay."""
    small = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": 0.0}
    return TargetEngine(model, TargetConfig(**(small | flags)), (SpeculationMode.SELF_SPECULATE,))


def drafting(model: Model, **flags) -> TargetEngine:
    """An engine whose model source drafts in every step, predicted to pay or not; prompt lookup is off."""
    engine = self_speculating(model, **flags)
    engine.speculation.chooser.looks_up = False
    engine.speculation.chooser.always = True
    return engine


def recorded_iterations(engine: TargetEngine) -> list[list[LoopIteration]]:
    """A list that receives the iterations of each fused loop from now on, one list for each loop."""
    loops: list[list[LoopIteration]] = []
    source = engine.speculation.chooser.source
    observe = source.observe_loop

    def record(session, iterations, **options):
        loops.append(list(iterations))
        observe(session, iterations, **options)

    source.observe_loop = record
    return loops


@contextmanager
def pending_message(engine: TargetEngine):
    """A message waits for the engine, until the function that is yielded is called."""
    read, write = os.pipe()
    os.write(write, b"!")

    @contextmanager
    def listen():
        yield (read,)

    engine.message_files = listen
    yield lambda: os.read(read, 1)
    os.close(read)
    os.close(write)


class PausedPolicy:
    """Stands for a mode policy: drafting is paused, unless a test sets the attributes otherwise."""

    mode, drafting_paused, without_drafts = SpeculationMode.NONE, True, True

    class wait:
        now, remaining, reads, reads_ahead = 0.0, 0.0, False, True
        gain = SimpleNamespace(committed=lambda *_: None)
        drafts_for = staticmethod(lambda _: False)
        closed = staticmethod(lambda _: None)

    def __getattr__(self, _):
        return lambda *args, **options: None

    def want_drafts(self) -> None:
        """Proposals are wanted from now on."""
        self.mode, self.drafting_paused, self.without_drafts = SpeculationMode.DRAFT_IF_READY, False, False


def twin_logits(twin, engine: TargetEngine, session, tokens: list[int]) -> Iterator[np.ndarray]:
    """The twin's logits [V] for each of a session's draft tokens, from the hidden states in the cache."""
    slots = session.table.slots(0, session.length - 1)
    states = engine.cache.states.flatten(0, 1)[slots].numpy()
    features = states @ twin.tensors["fc.weight"].T
    path = session.tokens.tolist()
    for token in tokens:
        logits = np.full(VOCAB, -np.inf)
        log_probs = twin.log_probs(path, features)
        logits[list(log_probs)] = list(log_probs.values())
        yield logits
        path.append(token)


def check_draft_tokens(twin, engine: TargetEngine):
    """Plan a step: the head's draft tokens and probabilities must be the twin's.

    Returns the step's works and the number of draft tokens that were compared."""
    source, calls = engine.speculation.chooser.source, []
    draft = source.draft_tokens
    source.draft_tokens = lambda *args: calls.append((args[0], draft(*args))) or calls[-1][1]
    works = engine.plan().works
    source.draft_tokens = draft
    count = 0
    for drafted_works, drafted in calls:
        for column, work in enumerate(drafted_works):
            session = work.chunk.session
            params, tokens = session.sampling, drafted.tokens[:, column].tolist()
            for depth, logits in enumerate(twin_logits(twin, engine, session, tokens)):
                token = tokens[depth]
                assert token == sample(logits, params, session.length + depth)
                expected = np.exp(log_softmax(logits / (params.temperature or 1.0))[token])
                assert drafted.probabilities[depth, column] == pytest.approx(expected, rel=1e-2)
                count += 1
    return works, count
