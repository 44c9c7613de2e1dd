"""Drives a target engine step by step, with the proposals of a test, and checks its invariants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outrider.config import TargetConfig
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Commit, FinishReason, Proposal, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from services.target.engine.engine import TargetEngine
from services.target.engine.launching.in_flight import InFlightStep
from services.target.model.base import Model
from services.target.model.loading.load import load
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from tests.support.tiny import VOCAB

GREEDY = SamplingParams(temperature=0.0)
# Given a session's id and tokens: proposals for its next step.
Proposals = Callable[[int, list[int]], Sequence[Proposal]]

_SMALL = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": 0.0}


def load_model(folder: Path, **flags) -> Model:
    """A model on the CPU, in float32 unless flags say otherwise, also where the checkpoint is narrower."""
    return load(folder, TargetConfig(**({"model_path": str(folder), "device": "cpu", "dtype": "float32"} | flags)))


def load_modules(folder: Path) -> Model:
    """A model that runs module by module, whose modules a test can reach."""
    return load_model(folder, attention_backend="torch_native")


def engine_of(model: Model, **flags) -> TargetEngine:
    """An engine with a small cache, which computes small prompts in one piece, verifies proposals at any cost,
    and returns after each step."""
    return TargetEngine(model, TargetConfig(**(_SMALL | flags)), DRAFT_MODES)


def counting(engine: TargetEngine, method: str, counter: str) -> TargetEngine:
    """The engine, with a counter of the steps that a method of its launcher launches behind another step."""
    launch = getattr(engine.launcher, method)
    setattr(engine, counter, 0)

    def counted(*arguments: Any) -> Any:
        following = launch(*arguments)
        setattr(engine, counter, getattr(engine, counter) + (following is not None))
        return following

    setattr(engine.launcher, method, counted)
    return engine


def spoiled_roots(monkeypatch: Any) -> list[int]:
    """A list that receives, for each step that is read from now on, how many of its roots had been wrong."""
    spoiled: list[int] = []
    read = InFlightStep.read

    def watched(step: InFlightStep, *arguments: Any) -> Any:
        spoiled.append(len(step.spoiled))
        return read(step, *arguments)

    monkeypatch.setattr(InFlightStep, "read", watched)
    return spoiled


def preparing_engine(model: Model, **flags) -> TargetEngine:
    """An engine whose device prepares the steps behind others, as on CUDA; it verifies what has arrived.

    prepared: such steps that were launched
    """
    engine = TargetEngine(model, TargetConfig(**(_SMALL | flags)), [SpeculationMode.DRAFT_IF_READY])
    assert not engine.launcher.prepares
    engine.overlap = engine.launcher.prepares = True
    sampler = engine.launcher.sampler
    sampler.alongside, sampler.walks, sampler.resamples = False, True, True
    return counting(engine, "_launch_prepared", "prepared")


CACHES: Sequence[dict[str, Any]] = (
    {}, {"page_size": 1}, {"page_size": 64}, {"disable_radix_cache": True}, {"coalesce_seconds": 60.0},
)  # fmt: skip
"""Flags of engines with other caches, or with coalesced commits."""


def run_as_plain(drafting: Callable[..., TargetEngine], model: Model, requests: Sequence[OpenSession], **flags) -> Run:
    """Runs an engine that drafts: texts and ends must be those of one that does not, and some drafts right."""
    expected = run(engine_of(model, **flags | {"coalesce_seconds": 0.0}), requests)
    found = run(drafting(model, **flags), requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert found.accepted > 0
    assert found.steps < expected.steps
    return found


def opening(
    session_id,
    prompt,
    params=GREEDY,
    *,
    max_tokens=24,
    committed=(),
    logprobs=None,
    prompt_logprobs=None,
    grammar=None,
    **stop,
) -> OpenSession:
    tokens = np.array([*prompt, *committed], np.uint32)
    conditions = StopConditions(max_tokens, **({"ignore_eos": True} | stop))
    return OpenSession(
        session_id, tokens, len(prompt), params, conditions, grammar=grammar, logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )  # fmt: skip


def chain(session_id, tokens, nodes, score=-0.1) -> Proposal:
    """A proposal of a single path below the last token."""
    count = len(nodes)
    parents = np.arange(-1, count - 1, dtype=np.int32)
    scores = np.full(count, score, np.float32)
    return Proposal(session_id, len(tokens), path_hash(np.array(tokens)), np.array(nodes, np.uint32), parents, scores)


def random_tree(rng, session_id, tokens, vocab, size) -> Proposal:
    """A random tree, whose tokens come from a few so that it branches and repeats."""
    nodes = rng.integers(0, vocab, size).astype(np.uint32)
    parents = np.array([rng.integers(-1, i) for i in range(size)], np.int32)
    scores = -rng.random(size).astype(np.float32)
    return Proposal(session_id, len(tokens), path_hash(np.array(tokens)), nodes, parents, scores)


@dataclass
class Run:
    """The output of an engine until it was idle."""

    new: dict[int, list[int]] = field(default_factory=dict)
    commits: dict[int, list[Commit]] = field(default_factory=dict)
    reasons: dict[int, FinishReason] = field(default_factory=dict)
    steps: int = 0
    verified: int = 0
    accepted: int = 0


def run(engine: TargetEngine, requests: Sequence[OpenSession], proposals: Proposals | None = None) -> Run:
    """Serve requests to their end. Checks that commits are contiguous, hashes true and pages home."""
    tokens = {request.session_id: request.tokens.tolist() for request in requests}
    result = Run(new={session_id: [] for session_id in tokens})
    for request in requests:
        engine.open(request)
    while not engine.idle:
        if proposals is not None:
            for session_id, path in tokens.items():
                engine.receive(proposals(session_id, path), ())
        output = engine.step()
        result.steps += 1
        assert not output.failures
        for commit in output.commits:
            path = tokens[commit.session_id]
            assert commit.base_length == len(path)
            assert commit.accepted <= min(commit.verified, len(commit.tokens))
            path += commit.tokens.tolist()
            assert commit.root_hash == path_hash(np.array(path))
            result.new[commit.session_id] += commit.tokens.tolist()
            result.commits.setdefault(commit.session_id, []).append(commit)
            result.verified += commit.verified
            result.accepted += commit.accepted
            if commit.finish_reason != FinishReason.RUNNING:
                result.reasons[commit.session_id] = commit.finish_reason
        engine.check()
    engine.scheduler.allocator.check(expected_leased=0)
    return result


def prompts(count, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(1, longest)).tolist() for _ in range(count)]


def requests_of(texts, params=GREEDY, **options):
    return [opening(i, text, params, **options) for i, text in enumerate(texts, start=1)]
