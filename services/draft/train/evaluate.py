"""Evaluation of a draft: held-out answers are replayed through the draft engine.

A recorded answer holds the token that the target sampled at every position, so no target is needed: the engine grows
its tree from the recorded states, a walk along the recorded tokens gives the draft tokens that verification would have
accepted, and the next states come with the commit. Noise is that of the answer's seed. The published folder is
replayed, read as the draft service reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from outrider.checkpoints.eagle3 import plain_name
from outrider.config import Algorithm, DraftConfig
from outrider.serving.features import FeatureBlock, FeatureFormat, decode
from outrider.serving.messages import OpenSession, StepOutput
from outrider.speculation.proposal import Commit, FinishReason, Proposal
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.drafters.base import Drafter
from services.draft.learning.records.store import Record
from services.draft.model.fusion import Fusion, read_fusion
from services.draft.model.weights.tensors import Tensors
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS

CHAIN = TreeShape(steps=5, topk=1, rows=6)
TREE = TreeShape(steps=5, topk=4, rows=16)
_BATCH = 8  # answers that are replayed together
_MIN_CACHE_TOKENS = 16_384  # in the draft's KV cache; more where the longest answers need more


def shapes_for(depth: int | None) -> dict[str, TreeShape]:
    """The trees of an evaluation by name. depth: of a draft that has one; None for the usual one."""
    if depth is None:
        return {"chain": CHAIN, "tree": TREE}
    return {"chain": TreeShape(depth, 1, depth + 1), "tree": replace(TREE, steps=depth)}


FeatureFunction = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class ReplayEngine(Protocol):
    """What a replay calls of a draft engine, which benchmarks time."""

    @property
    def idle(self) -> bool:
        """As of DraftEngine."""

    def open(self, request: OpenSession) -> None:
        """As of DraftEngine."""

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """As of DraftEngine."""

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:
        """As of DraftEngine."""

    def step(self) -> StepOutput:
        """As of DraftEngine."""


@dataclass
class Score:
    """Counts over verification steps, each after one draft tree.

    tokens: committed; steps: verification steps; reached, met: by depth, how often the recorded text reached a node's
    parent, and the node itself
    """

    tokens: int = 0
    steps: int = 0
    reached: NDArray[np.int64] | None = None
    met: NDArray[np.int64] | None = None

    @property
    def accept_length(self) -> float:
        """Tokens per verification step, bonus token included."""
        return self.tokens / self.steps if self.steps else 0.0

    def count(self, depth: int, accepted: int) -> None:
        """Count one verification step. depth: levels of the tree; accepted: draft tokens that were accepted."""
        if self.reached is None or self.met is None:
            self.reached, self.met = np.zeros(depth, np.int64), np.zeros(depth, np.int64)
        self.reached[: min(accepted + 1, depth)] += 1
        self.met[:accepted] += 1
        self.tokens, self.steps = self.tokens + accepted + 1, self.steps + 1

    def facts(self) -> dict[str, Any]:
        """The counts as JSON values."""
        depths = [] if self.reached is None or self.met is None else (self.met / np.maximum(self.reached, 1)).tolist()
        return {"accept_length": self.accept_length, "tokens": self.tokens, "by_depth": depths}


def replay(
    algorithm: Algorithm, folder: Path, target: Path, records: Sequence[Record], shape: TreeShape, device: str = "auto"
) -> dict[float, Score]:
    """Scores of a published draft by temperature. Raises ConfigError for a draft that does not fit the target.

    target: folder of its checkpoint; shape: of the draft trees; device: as of --draft-device
    """
    from services.draft.process.app import build

    longest = max((len(record.tokens) for record in records), default=0)
    room = _BATCH * (longest + SCRATCH_SLOTS + 2 * DraftConfig().draft_page_size)
    config = DraftConfig(
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(folder), model_path=str(target), draft_device=device,
        draft_feature_dtype="float32",
        max_running_requests=_BATCH, draft_max_total_tokens=max(_MIN_CACHE_TOKENS, room), disable_radix_cache=True,
        speculative_dflash_block_size=shape.steps + 1 if algorithm == "DFLASH" else None,
        speculative_num_steps=shape.steps, speculative_eagle_topk=shape.topk, speculative_num_draft_tokens=shape.rows,
    )  # fmt: skip
    engine = build(config)[0]
    return replay_through(engine, feature_function(engine.drafter, folder), records, shape)


def replay_through(
    engine: ReplayEngine, feed: FeatureFunction | None, records: Sequence[Record], shape: TreeShape, batch: int = _BATCH
) -> dict[float, Score]:
    """Scores of an engine by temperature. feed: makes its features; batch: answers that are replayed together."""
    scores: dict[float, Score] = {}
    waiting = [_Replay(number, record, engine, feed) for number, record in enumerate(records, start=1)]
    running: list[_Replay] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop(0))
            running[-1].open()
        _grow(engine, {replayed.number: replayed for replayed in running})
        for replayed in running:
            replayed.verify(scores.setdefault(replayed.record.temperature, Score()), shape)
        running = [replayed for replayed in running if not replayed.over]
    return scores


def _grow(engine: ReplayEngine, running: dict[int, _Replay]) -> None:
    """Step the engine until no tree can grow further."""
    while not engine.idle:
        output = engine.step()
        assert not output.failures, output.failures
        for proposal in output.proposals:
            if proposal.session_id in running:
                running[proposal.session_id].tree.merge(proposal)


class _Replay:
    """One answer that is being replayed."""

    def __init__(self, number: int, record: Record, engine: ReplayEngine, feed: FeatureFunction | None) -> None:
        self.number, self.record, self._engine, self._feed = number, record, engine, feed
        self._tokens = record.tokens.astype(np.uint32)
        self._length = record.prompt
        self._fed = 0
        self.tree = SpeculationTree(self._tokens[: self._length])
        self.over = False

    def open(self) -> None:
        """Open the session, and commit the first token of the answer, which the target samples with the prompt."""
        prompt = self._tokens[: self._length]
        sampling = SamplingParams(temperature=self.record.temperature, seed=self.record.seed)
        stop = StopConditions(len(self._tokens) - len(prompt) + 1)
        self._engine.open(OpenSession(self.number, prompt, len(prompt), sampling, stop))
        self._commit(1, 0)

    def verify(self, score: Score, shape: TreeShape) -> None:
        """Count what verification would have accepted of the present tree, and commit it."""
        draft = self.tree.select(shape.rows - 1)
        children = {
            (int(parent), int(token)): i
            for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
        }
        node, accepted = ROOT, 0
        for token in self._tokens[self._length :].tolist():
            if (node, token) not in children:
                break
            node, accepted = children[node, token], accepted + 1
        if self._length + accepted >= len(self._tokens):  # the draft reached the last token: there is no bonus token
            accepted = len(self._tokens) - self._length - 1
        score.count(shape.steps, accepted)
        self._commit(accepted + 1, accepted)

    def _commit(self, count: int, accepted: int) -> None:
        base, tokens = self._length, self._tokens[self._length : self._length + count]
        self._length += count
        self.tree.commit(tokens)
        self.over = self._length >= len(self._tokens)
        reason = FinishReason.STOP if self.over else FinishReason.RUNNING
        commit = Commit(self.number, base, tokens, self.tree.root_hash, accepted=accepted, finish_reason=reason)
        self._engine.receive([], [commit])
        if not self.over and self._feed is not None:
            states = self._feed(decode(self.record.rows[self._fed : self._length - 1], FeatureFormat.BFLOAT16))
            rows = np.ascontiguousarray(states, np.float32).view(np.uint8)
            self._engine.receive_features([FeatureBlock(self.number, self._fed, rows)])
            self._fed = self._length - 1


def feature_function(drafter: Drafter, folder: Path) -> FeatureFunction | None:
    """The features that a target would send for recorded states, [N, n * Ht]; None for drafters without features."""
    spec = drafter.features
    if spec is None:
        return None
    if not drafter.fusion:
        return lambda states: states
    count = len(spec.layers) or 3
    with Tensors(folder, plain_name) as tensors:
        params = {name: jnp.asarray(array, jnp.float32) for name, array in read_fusion(tensors, count).items()}
    fusion = Fusion(count, len(params["fuse"]), spec.norm_epsilon)
    # The last recorded state stands behind the others and is no input of the fusion.
    return lambda states: np.asarray(fusion(params, jnp.asarray(states[:, : fusion.width])))
