"""The input arrays of one step of the draft model, built on the host. Page ids are inputs, not state of the device.

Every step has one of a few shapes, each compiled once: S sessions with Q rows each. Padding rows use the null page.
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
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, PrefixKV
from services.draft.sessions.session import DraftSession

MASK_WORDS = SCRATCH_SLOTS // 32


class StepShape(NamedTuple):
    """A compiled shape of steps. heads: rows a session with candidates, either all rows or the last one.

    tree: explicit tree that grows from the last row in the same program
    """

    sessions: int
    rows: int
    heads: int
    tree: TreeShape | None = None

    @property
    def moves(self) -> int:
        """Rows that can move from the scratch into the prefix KV in one step."""
        return max(16, 4 * self.sessions)


class FeatureInputs(NamedTuple):
    """Inputs of models with features, int32 except `rows`. S sessions, Q rows, W width of a feature.

    rows:    [S, Q, W] float32, the target's features
    given:   [S, Q], 1 for rows with a feature of the target
    sources: [S, Q], slots of the rows whose own features the other rows read; for n stacked layers [S, Q, n], slots of
             the target's features; for chained ones, behind the first, the slot of the row before
    layers:  [S, Q], for stacked layers the layer that predicts from each row
    """

    rows: Any
    given: Any
    sources: Any
    layers: Any = None


class StepInputs(NamedTuple):
    """Inputs of the step program, int32 unless stated. S sessions, Q rows, R rows with candidates, M moves.

    tokens, positions, slots: [S, Q]
    visible:       [S, Q], number of tokens of the prefix KV that each row attends to
    head_rows:     [S, R], rows with candidates
    pages:         [S, P]
    scratch_slots: [S, C]
    scratch_bits:  [S, Q, C / 32] uint32, scratch slots that each row attends to
    moves:         [2, M], source and target slots
    temperature, top_p, min_p: [S] float32; top_k: [S]
    keys:          [S, R, 2] uint32, noise keys
    level_keys:    [S, L, 2] uint32, noise keys of the levels of a whole tree below the first
    features:      None for models without features

    On the host all inputs but the target's features are views of one array of words, because a program call takes long
    with many arguments.
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


class InputLayout(NamedTuple):
    """The order of the inputs of a shape among the words of a step.

    table_pages: width of the page tables; feature_width: 0 for models without features; stacked: number of stacked
    layers; chained: they read one another's states
    """

    shape: StepShape
    table_pages: int
    feature_width: int = 0
    stacked: int = 0
    chained: bool = False

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
        """Words as inputs. rows: the target's features. view: reinterprets words in another number format."""
        parts: list[Any] = []
        place = 0
        for shape, kind in self.fields():
            count = math.prod(shape)
            part = words[place : place + count].reshape(shape)
            parts.append(part if kind is np.int32 else view(part, kind))
            place += count
        own = len(StepInputs._fields) - 1
        features = FeatureInputs(rows, *parts[own:]) if self.feature_width else None
        return StepInputs._make((*parts[:own], features))

    def words(self) -> int:
        """Number of words."""
        return sum(math.prod(shape) for shape, _ in self.fields())


@dataclass(frozen=True)
class SessionWork:
    """The work of a step for one session: the next `feed` rows of the prefix KV, or the expansion of nodes.

    features: [feed, W] float32, of the fed rows, for models with features
    """

    session: DraftSession
    prefix_kv: PrefixKV
    feed: int = 0
    nodes: tuple[int, ...] = ()
    features: NDArray[np.float32] | None = None


def empty_inputs(layout: InputLayout) -> StepInputs:
    """Inputs with padding alone."""
    shape = layout.shape
    words = np.zeros(layout.words(), np.int32)
    rows = np.zeros((shape.sessions, shape.rows, layout.feature_width), np.float32)
    inputs = layout.inputs(words, rows, lambda part, kind: part.view(kind))
    inputs.head_rows[:] = np.arange(shape.heads)
    inputs.top_p[:] = 1.0
    return inputs


class StepBuffer:
    """Reusable inputs of one layout: laying them out takes longer than filling them.

    A step must be done before the next one with the same layout is built.
    """

    def __init__(self, layout: InputLayout) -> None:
        self.layout = layout
        self._inputs = empty_inputs(layout)
        self._words: NDArray[np.int32] = self._inputs.tokens.base  # all inputs are views of it
        self._padding = self._words.copy()

    def cleared(self) -> StepInputs:
        """The inputs, reset to padding."""
        self._words[:] = self._padding
        if self._inputs.features is not None:
            self._inputs.features.rows[:] = 0
        return self._inputs


def build_inputs(step_buffer: StepBuffer, works: list[SessionWork], moves: list[tuple[int, int]]) -> StepInputs:
    """Inputs of a step. Nodes that are expanded get their scratch slots here."""
    inputs, stacked = step_buffer.cleared(), step_buffer.layout.stacked
    if moves:
        inputs.moves[:, : len(moves)] = np.array(moves, dtype=np.int32).T
    for row, work in enumerate(works):
        _describe_session(inputs, row, work)
        if work.feed:
            _feed_prefix(inputs, row, work)
        else:
            _expand_nodes(inputs, row, work)
            if inputs.features is not None and not stacked:
                inputs.features.sources[row, : len(work.nodes)] = _parents(inputs, row, work, moves)
        if stacked:
            _point_at_features(inputs, row, work, stacked)
            if step_buffer.layout.chained:
                _point_at_rows_before(inputs, row, work)
    return inputs


def _point_at_features(inputs: StepInputs, row: int, work: SessionWork, stacked: int) -> None:
    """Layer i of a row at position p is fused with the target's feature p - i if it is known; slot 0 holds none."""
    assert inputs.features is not None
    count = work.feed or len(work.nodes)
    known = work.prefix_kv.settled + work.feed
    wanted = inputs.positions[row, :count, None] - np.arange(stacked)
    slots = work.prefix_kv.table.slots(0, known)
    there = (wanted >= 0) & (wanted < known)
    inputs.features.sources[row, :count] = np.where(there, slots[np.where(there, wanted, 0)], 0)
    inputs.features.layers[row, :count] = np.clip(inputs.positions[row, :count] - known + 1, 0, stacked - 1)


def _point_at_rows_before(inputs: StepInputs, row: int, work: SessionWork) -> None:
    """Chained layers but the first read the state of the row before, after the moves of this step."""
    assert inputs.features is not None
    if not work.feed:
        before = np.array(_parents(inputs, row, work, []))
    else:
        wanted = inputs.positions[row, : work.feed] - 1
        slots = work.prefix_kv.table.slots(0, work.prefix_kv.settled + work.feed)
        before = np.where(wanted >= 0, slots[np.maximum(wanted, 0)], 0)
    inputs.features.sources[row, : len(before), 1:] = before[:, None]


def _parents(inputs: StepInputs, row: int, work: SessionWork, moves: list[tuple[int, int]]) -> list[int]:
    """The slots of the nodes' parents, before the moves of this step."""
    moved = {target: source for source, target in moves}
    last = work.session.length - work.prefix_kv.shift
    root = int(work.prefix_kv.table.slots(last - 1, last)[0])
    above = [work.session.tree.parent[node] for node in work.nodes]
    slots = [root if node == ROOT else int(inputs.scratch_slots[row, work.prefix_kv.slot(node)]) for node in above]
    return [moved.get(slot, slot) for slot in slots]


def _describe_session(inputs: StepInputs, row: int, work: SessionWork) -> None:
    pages = work.prefix_kv.table.pages
    inputs.pages[row, : len(pages)] = pages
    inputs.scratch_slots[row] = work.prefix_kv.scratch_slots
    sampling = work.session.sampling
    inputs.temperature[row] = sampling.temperature
    inputs.top_p[row] = sampling.top_p
    inputs.min_p[row] = sampling.min_p
    inputs.top_k[row] = min(sampling.top_k, 2**31 - 1)


def _feed_prefix(inputs: StepInputs, row: int, work: SessionWork) -> None:
    start, shift = work.prefix_kv.settled, work.prefix_kv.shift
    stop = start + work.feed
    positions = np.arange(start, stop)
    inputs.tokens[row, : work.feed] = work.session.tokens[start + shift : stop + shift]
    inputs.positions[row, : work.feed] = positions
    inputs.slots[row, : work.feed] = work.prefix_kv.table.slots(start, stop)
    inputs.visible[row, : work.feed] = positions + 1
    # The last fed row comes first among the rows with candidates.
    inputs.head_rows[row, 0] = work.feed - 1
    ahead = 1 + inputs.level_keys.shape[1]
    keys = work.session.noise_keys(np.arange(stop + shift, stop + shift + ahead))
    inputs.keys[row, 0], inputs.level_keys[row] = keys[0], keys[1:]
    if inputs.features is not None:
        assert work.features is not None, "rows of the prefix KV are computed from the target's features"
        inputs.features.rows[row, : work.feed] = work.features
        inputs.features.given[row, : work.feed] = True


def _expand_nodes(inputs: StepInputs, row: int, work: SessionWork) -> None:
    tree, count = work.session.tree, len(work.nodes)
    length = work.session.length
    rows = length - work.prefix_kv.shift  # of the prefix KV
    slots = [work.prefix_kv.expand(node, tree.parent[node]) for node in work.nodes]
    depths = np.array([tree.depth[node] for node in work.nodes])
    # Through uint32, as in `_feed_prefix`: a session may contain ids that the model lacks, and n-grams repeat them.
    inputs.tokens[row, :count] = np.array([tree.token[node] for node in work.nodes], np.uint32)
    inputs.positions[row, :count] = rows - 1 + depths
    inputs.slots[row, :count] = inputs.scratch_slots[row, slots]
    inputs.visible[row, :count] = rows
    for i, node in enumerate(work.nodes):
        mask = work.prefix_kv.mask(node)
        inputs.scratch_bits[row, i] = [mask >> 32 * word & 0xFFFFFFFF for word in range(MASK_WORDS)]
    inputs.keys[row, :count] = work.session.noise_keys(length + depths)
