"""The arrays of one step of the draft model, built on the host. Page ids are inputs and never live on the device.

Every step has one of a few shapes, each compiled once: S sessions with Q rows each. Rows that are not needed read and
write the null page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, Trunk
from services.draft.sessions.session import DraftSession

MASK_WORDS = SCRATCH_SLOTS // 32


class Shape(NamedTuple):
    """A compiled shape. heads: rows a session that give candidates; either all of them or the last one alone.

    tree: explicit tree that grows from the last row in the same program
    """

    sessions: int
    rows: int
    heads: int
    tree: TreeShape | None = None

    @property
    def moves(self) -> int:
        """Rows that can move from scratch to trunk in one step."""
        return max(16, 4 * self.sessions)


class FeatureInputs(NamedTuple):
    """Inputs of models that are fed, int32 unless said otherwise. S sessions, Q rows.

    rows:    [S, Q, W] float32, the target's features
    given:   [S, Q], 1 for rows that have one
    sources: [S, Q], slots of the rows whose own features the others take; for n stacked layers [S, Q, n], slots of the
             target's features
    layers:  [S, Q], of stacked layers the one that predicts from each row
    """

    rows: Any
    given: Any
    sources: Any
    layers: Any = None


class StepInputs(NamedTuple):
    """Inputs of the step program, int32 unless said otherwise. S sessions, Q rows, R rows with candidates, M moves.

    tokens, positions, slots, visible: [S, Q], visible in trunk tokens; head_rows: [S, R], rows that give candidates;
    pages: [S, P]; scratch_slots: [S, C]; scratch_bits: [S, Q, C / 32] uint32; moves: [2, M], source and target slots;
    temperature, top_p, min_p: [S] float32; top_k: [S]; keys: [S, R, 2] uint32; level_keys: [S, L, 2] uint32, of the
    levels of a whole tree below the first
    features: None for models that are not fed

    On the host all but the target's features are views of one array of words: a program takes long to be called with
    many.
    """

    tokens: Any
    positions: Any
    slots: Any
    visible: Any
    head_rows: Any
    pages: Any
    scratch_slots: Any
    scratch_bits: Any
    moves: Any
    temperature: Any
    top_p: Any
    min_p: Any
    top_k: Any
    keys: Any
    level_keys: Any
    features: FeatureInputs | None = None


class Layout(NamedTuple):
    """Where the inputs of a shape stand among the words of a step.

    table_pages: width of the page tables. feature_width: 0 for models that are not fed. stacked: layers side by side.
    """

    shape: Shape
    table_pages: int
    feature_width: int = 0
    stacked: int = 0

    def fields(self) -> list[tuple[tuple[int, ...], type]]:
        """Shape and number format of each input, those of features behind the others."""
        sessions, rows, heads, tree = self.shape
        grid, each = (sessions, rows), (sessions,)
        fields: list[tuple[tuple[int, ...], type]] = [
            *[(grid, np.int32)] * 4,
            ((sessions, heads), np.int32),
            ((sessions, self.table_pages), np.int32),
            ((sessions, SCRATCH_SLOTS), np.int32),
            ((*grid, MASK_WORDS), np.uint32),
            ((2, self.shape.moves), np.int32),
            *[(each, np.float32)] * 3,
            (each, np.int32),
            ((sessions, heads, 2), np.uint32),
            ((sessions, tree.steps - 1 if tree else 0, 2), np.uint32),
        ]
        if self.stacked:
            fields += [(grid, np.int32), ((*grid, self.stacked), np.int32), (grid, np.int32)]
        elif self.feature_width:
            fields += [(grid, np.int32)] * 2
        return fields

    def inputs(self, words: Any, rows: Any, view: Callable[[Any, type], Any]) -> StepInputs:
        """Words as inputs. rows: the target's features. view: of words as numbers of a format."""
        parts: list[Any] = []
        place = 0
        for shape, kind in self.fields():
            count = math.prod(shape)
            part = words[place : place + count].reshape(shape)
            parts.append(part if kind is np.int32 else view(part, kind))
            place += count
        own = len(StepInputs._fields) - 1
        return StepInputs(*parts[:own], features=FeatureInputs(rows, *parts[own:]) if self.feature_width else None)

    def words(self) -> int:
        """How many there are."""
        return sum(math.prod(shape) for shape, _ in self.fields())


@dataclass(frozen=True)
class Job:
    """What a step does for one session: the next `feed` rows of the trunk, or the expansion of nodes.

    features: [feed, W] float32, of the rows that are fed, for models that need them
    """

    session: DraftSession
    trunk: Trunk
    feed: int = 0
    nodes: tuple[int, ...] = ()
    features: NDArray[np.float32] | None = None


def empty_inputs(layout: Layout) -> StepInputs:
    """Inputs of padding alone."""
    shape = layout.shape
    words = np.zeros(layout.words(), np.int32)
    rows = np.zeros((shape.sessions, shape.rows, layout.feature_width), np.float32)
    inputs = layout.inputs(words, rows, lambda part, kind: part.view(kind))
    inputs.head_rows[:] = np.arange(shape.heads)
    inputs.top_p[:] = 1.0
    return inputs


class Blank:
    """Inputs of a layout that are filled anew for every step: to lay them out takes longer than to fill them.

    A step must be over before the next one of the same layout is described.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._inputs = empty_inputs(layout)
        self._words: NDArray[np.int32] = self._inputs.tokens.base  # of which all inputs are views
        self._padding = self._words.copy()

    def fresh(self) -> StepInputs:
        """The inputs, all padding."""
        self._words[:] = self._padding
        if self._inputs.features is not None:
            self._inputs.features.rows[:] = 0
        return self._inputs


def build_inputs(blank: Blank, jobs: list[Job], moves: list[tuple[int, int]]) -> StepInputs:
    """Inputs of a step. Nodes that it expands get their scratch slots here."""
    inputs, stacked = blank.fresh(), blank.layout.stacked
    if moves:
        inputs.moves[:, : len(moves)] = np.array(moves, dtype=np.int32).T
    for row, job in enumerate(jobs):
        _describe_session(inputs, row, job)
        if job.feed:
            _feed_trunk(inputs, row, job)
        else:
            _expand_nodes(inputs, row, job)
            if inputs.features is not None and not stacked:
                inputs.features.sources[row, : len(job.nodes)] = _parents(inputs, row, job, moves)
        if stacked:
            _point_at_features(inputs, row, job, stacked)
    return inputs


def _point_at_features(inputs: StepInputs, row: int, job: Job, stacked: int) -> None:
    """Layer i of a row at position p is joined with the target's feature p - i, if that is known; slot 0 has none."""
    assert inputs.features is not None
    count = job.feed or len(job.nodes)
    known = job.trunk.settled + job.feed
    wanted = inputs.positions[row, :count, None] - np.arange(stacked)
    slots = job.trunk.table.slots(0, known)
    there = (wanted >= 0) & (wanted < known)
    inputs.features.sources[row, :count] = np.where(there, slots[np.where(there, wanted, 0)], 0)
    inputs.features.layers[row, :count] = np.clip(inputs.positions[row, :count] - known + 1, 0, stacked - 1)


def _parents(inputs: StepInputs, row: int, job: Job, moves: list[tuple[int, int]]) -> list[int]:
    """The slots of the rows above the nodes, as they are before the step's moves."""
    moved = {target: source for source, target in moves}
    last = job.session.length - job.trunk.shift
    root = int(job.trunk.table.slots(last - 1, last)[0])
    above = [job.session.tree.parent[node] for node in job.nodes]
    slots = [root if node == ROOT else int(inputs.scratch_slots[row, job.trunk.slot(node)]) for node in above]
    return [moved.get(slot, slot) for slot in slots]


def _describe_session(inputs: StepInputs, row: int, job: Job) -> None:
    pages = job.trunk.table.pages
    inputs.pages[row, : len(pages)] = pages
    inputs.scratch_slots[row] = job.trunk.scratch_slots
    sampling = job.session.sampling
    inputs.temperature[row] = sampling.temperature
    inputs.top_p[row] = sampling.top_p
    inputs.min_p[row] = sampling.min_p
    inputs.top_k[row] = min(sampling.top_k, 2**31 - 1)


def _feed_trunk(inputs: StepInputs, row: int, job: Job) -> None:
    start, shift = job.trunk.settled, job.trunk.shift
    stop = start + job.feed
    positions = np.arange(start, stop)
    inputs.tokens[row, : job.feed] = job.session.tokens[start + shift : stop + shift]
    inputs.positions[row, : job.feed] = positions
    inputs.slots[row, : job.feed] = job.trunk.table.slots(start, stop)
    inputs.visible[row, : job.feed] = positions + 1
    # The last fed row stands first among those that give candidates.
    inputs.head_rows[row, 0] = job.feed - 1
    ahead = 1 + inputs.level_keys.shape[1]
    keys = job.session.keys(np.arange(stop + shift, stop + shift + ahead))
    inputs.keys[row, 0], inputs.level_keys[row] = keys[0], keys[1:]
    if inputs.features is not None:
        assert job.features is not None, "rows of the trunk are fed with the target's features"
        inputs.features.rows[row, : job.feed] = job.features
        inputs.features.given[row, : job.feed] = True


def _expand_nodes(inputs: StepInputs, row: int, job: Job) -> None:
    tree, count = job.session.tree, len(job.nodes)
    length = job.session.length
    rows = length - job.trunk.shift  # of the trunk
    slots = [job.trunk.expand(node, tree.parent[node]) for node in job.nodes]
    depths = np.array([tree.depth[node] for node in job.nodes])
    # By way of uint32, as in `_feed_trunk`: a session may name ids that no model has, and n-grams repeat them.
    inputs.tokens[row, :count] = np.array([tree.token[node] for node in job.nodes], np.uint32)
    inputs.positions[row, :count] = rows - 1 + depths
    inputs.slots[row, :count] = inputs.scratch_slots[row, slots]
    inputs.visible[row, :count] = rows
    for i, node in enumerate(job.nodes):
        mask = job.trunk.mask(node)
        inputs.scratch_bits[row, i] = [mask >> 32 * word & 0xFFFFFFFF for word in range(MASK_WORDS)]
    inputs.keys[row, :count] = job.session.keys(length + depths)
