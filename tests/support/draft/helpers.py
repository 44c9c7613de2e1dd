"""Builders for the draft's tests: sessions, drafters on tiny checkpoints, and a target simulated by the oracle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.config import DraftConfig
from outrider.serving.messages import OpenSession, StepOutput
from outrider.speculation.acceptance import verify
from outrider.speculation.proposal import Commit, FinishReason, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import SpeculationTree
from services.draft.engine.engine import DraftEngine
from services.draft.process.app import build

GREEDY = SamplingParams(temperature=0.0)


def request(
    session_id: int, tokens: list[int], sampling: SamplingParams = GREEDY, max_tokens: int = 64, **stop
) -> OpenSession:
    return OpenSession(
        session_id, np.array(tokens, np.uint32), len(tokens), sampling, StopConditions(max_tokens, **stop)
    )


def standalone(folder: Path, **flags) -> DraftEngine:
    options = {"max_running_requests": 4, "draft_max_total_tokens": 2048, "draft_dtype": "float32"} | flags
    config = DraftConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder), **options)
    return build(config)[0]


def feature_engine(algorithm: str, folder: Path, target: Path, **flags) -> DraftEngine:
    """An engine around a feature-based head, in float32."""
    options = {
        "max_running_requests": 4, "draft_max_total_tokens": 2048, "speculative_draft_model_path": str(folder),
        "model_path": str(target), "draft_feature_dtype": "float32", "draft_dtype": "float32",
    }  # fmt: skip
    return build(DraftConfig(speculative_algorithm=algorithm, **(options | flags)))[0]


def ngram(**flags) -> DraftEngine:
    return build(DraftConfig(speculative_algorithm="NGRAM", **flags))[0]


def torch_logits(folder: Path) -> Callable[[list[int]], np.ndarray]:
    """Next-token logits of a whole path, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def next_logits(path: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([path])).logits[0, -1].numpy()

    return next_logits


def all_logits(folder: Path, path: list[int]) -> np.ndarray:
    """Logits [n, V] of every prefix of a path, by transformers."""
    import torch

    with torch.no_grad():
        return _torch_model(folder)(torch.tensor([path])).logits[0].numpy()


@functools.lru_cache(maxsize=1)
def _torch_model(folder: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class OracleTarget:
    """A target that verifies by the oracle, one session at a time, and reports what it committed."""

    def __init__(self, next_logits: Callable[[list[int]], np.ndarray], opened: OpenSession, budget: int = 8) -> None:
        self.next_logits, self.budget = next_logits, budget
        self.id, self.sampling = opened.session_id, opened.sampling
        self.tokens = opened.tokens.tolist()
        self.tree = SpeculationTree(opened.tokens)
        self.verified = self.accepted = self.unknown = 0
        self.commits: list[Commit] = []

    def hear(self, output: StepOutput) -> None:
        assert output.failures == []
        for proposal in output.proposals:
            if proposal.session_id == self.id:
                known = self.tree.merge(proposal)
                self.unknown += known < len(proposal.tokens)

    def step(self) -> Commit:
        draft = self.tree.select(self.budget)
        committed = verify(self.next_logits, self.tokens, draft, self.sampling)
        base = len(self.tokens)
        self.tokens += committed
        new = np.array(committed, np.uint32)
        self.tree.commit(new)
        self.verified += len(draft)
        self.accepted += len(committed) - 1
        commit = Commit(self.id, base, new, self.tree.root_hash, len(draft), len(committed) - 1)
        self.commits.append(commit)
        return commit


def commit_of(tokens: list[int], new: list[int], session_id: int = 1) -> Commit:
    """A commit of new tokens behind others."""
    path = path_hash(np.array([*tokens, *new]))
    return Commit(session_id, len(tokens), np.array(new, np.uint32), path)


def finish(commit: Commit) -> Commit:
    return Commit(commit.session_id, commit.base_length, commit.tokens, commit.root_hash,
                  finish_reason=FinishReason.LENGTH)  # fmt: skip


def settle(engine: DraftEngine, limit: int = 500) -> list[StepOutput]:
    """Step until the engine rests."""
    outputs = []
    while not engine.idle:
        assert len(outputs) < limit, "the engine does not come to rest"
        outputs.append(engine.step())
    engine.check()
    return outputs
