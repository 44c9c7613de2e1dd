"""What each drafter proposes at every position of recorded answers, whatever is verified there.

A head or a small model grows an explicit tree, n-grams are looked up once. One token is committed at a time, so that a
tree of every position is known, and any rule that merges trees can be replayed on them without a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from outrider.config import Algorithm, DraftConfig
from outrider.serving.features import FeatureBlock, FeatureFormat, decode
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Commit, FinishReason
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.drafters.ngram import NgramDrafter
from services.draft.engine.engine import DraftEngine
from services.draft.learning.records.store import Record
from services.draft.process.app import build
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS
from services.draft.sessions.session import DraftSession
from services.draft.train.evaluate import FeatureFunction, feature_function

SHAPE = TreeShape(steps=6, topk=6, rows=16)
_BATCH = 8  # answers that are replayed together


@dataclass(frozen=True)
class Nodes:
    """The nodes that a drafter proposes at one position, parents before children. parents: -1 for the root."""

    tokens: list[int]
    parents: list[int]
    log_scores: list[float]


Trees = list[Nodes]  # of an answer, by position; the first one is behind the answer's first token


def of_model(algorithm: Algorithm, folder: Path, target: Path, records: Sequence[Record]) -> list[Trees]:
    """The explicit trees of a draft model. Raises ConfigError for a draft that does not fit the target."""
    longest = max(len(record.tokens) for record in records)
    flags = SHAPE.steps, SHAPE.topk, SHAPE.rows
    config = DraftConfig(
        speculative_algorithm=algorithm, speculative_draft_model_path=str(folder), model_path=str(target),
        draft_feature_dtype="float32", max_running_requests=_BATCH, disable_radix_cache=True,
        draft_max_total_tokens=_BATCH * (longest + SCRATCH_SLOTS + 2 * DraftConfig().draft_page_size),
        speculative_dflash_block_size=SHAPE.steps + 1 if algorithm == "DFLASH" else None,
        speculative_num_steps=flags[0], speculative_eagle_topk=flags[1], speculative_num_draft_tokens=flags[2],
    )  # fmt: skip
    engine = build(config)[0]
    feed = feature_function(engine.drafter, folder)
    found: list[Trees] = [[] for _ in records]
    waiting = [_Walk(number, record, engine, feed) for number, record in enumerate(records)]
    running: list[_Walk] = []
    while waiting or running:
        while waiting and len(running) < _BATCH:
            running.append(waiting.pop(0))
            running[-1].open()
        while not engine.idle:
            output = engine.step()
            assert not output.failures, output.failures
        for walk in running:
            found[walk.number].append(_proposed(walk.session))
            walk.commit()
        running = [walk for walk in running if not walk.over]
    return found


def of_ngrams(records: Sequence[Record]) -> list[Trees]:
    """What n-grams of the earlier answers, and of the text so far, propose. Temperatures share nothing."""
    found: list[Trees] = []
    last = None
    for number, record in enumerate(records):
        if record.temperature != last:
            engine = build(DraftConfig(speculative_algorithm="NGRAM", speculative_num_draft_tokens=SHAPE.rows))[0]
            last = record.temperature
        drafter = engine.drafter
        assert isinstance(drafter, NgramDrafter)
        walk = _Walk(number, record, engine, None)
        walk.open()
        while drafter.busy:
            drafter.work()
        trees: Trees = []
        while not walk.over:
            expansion = drafter.look_up(walk.session, ROOT)
            trees.append(Nodes(list(expansion.tokens), list(expansion.parents), list(expansion.log_scores)))
            walk.commit()
        found.append(trees)
    return found


def _proposed(session: DraftSession) -> Nodes:
    tree = session.tree
    chosen = sorted(session.frontiers[-1].selected(tree))
    row = {node: place for place, node in enumerate(chosen)} | {ROOT: ROOT}
    scores = [tree.log_score[node] for node in chosen]
    return Nodes([tree.token[node] for node in chosen], [row[tree.parent[node]] for node in chosen], scores)


class _Walk:
    """One answer that is committed token by token."""

    def __init__(self, number: int, record: Record, engine: DraftEngine, feed: FeatureFunction | None) -> None:
        self.number, self.over = number, False
        self._record, self._engine, self._feed = record, engine, feed
        self._tokens: NDArray[np.uint32] = record.tokens.astype(np.uint32)
        self._length, self._fed = record.prompt, 0
        self._path = SpeculationTree(self._tokens[: self._length])

    @property
    def session(self) -> DraftSession:
        return self._engine.sessions[self.number]

    def open(self) -> None:
        """Open the session, and commit the first token, which the target samples with the prompt."""
        prompt = self._tokens[: self._length]
        sampling = SamplingParams(temperature=self._record.temperature, seed=self._record.seed)
        stop = StopConditions(2 * len(self._tokens))
        self._engine.open(OpenSession(self.number, prompt, len(prompt), sampling, stop))
        self.commit()

    def commit(self) -> None:
        """Commit the next token."""
        base, tokens = self._length, self._tokens[self._length : self._length + 1]
        self._length += 1
        self._path.commit(tokens)
        self.over = self._length >= len(self._tokens)
        reason = FinishReason.STOP if self.over else FinishReason.RUNNING
        self._engine.receive([], [Commit(self.number, base, tokens, self._path.root_hash, finish_reason=reason)])
        if not self.over and self._feed is not None:
            states = self._feed(decode(self._record.rows[self._fed : self._length - 1], FeatureFormat.BFLOAT16))
            rows = np.ascontiguousarray(states, np.float32).view(np.uint8)
            self._engine.receive_features([FeatureBlock(self.number, self._fed, rows)])
            self._fed = self._length - 1
