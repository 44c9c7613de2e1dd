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
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS, PrefixKV
from services.draft.sessions.session import DraftSession

MASK_WORDS = SCRATCH_SLOTS // 32


class Growth(NamedTuple):
    """Rounds of growth of adaptive trees in one program, after the root was expanded.

    width: nodes of a session that a round expands, at most as many as the root has children
    """

    rounds: int
    width: int

    @property
    def steps(self) -> int:
        """Levels, at most."""
        return self.rounds + 1

    @property
    def expansions(self) -> int:
        """Number of expanded nodes, without the root."""
        return self.rounds * self.width


class Rounds(NamedTuple):
    """Rounds of growth in one program that expand one node of a session each, as many as are worth their time.

    most: rounds at most; how many there are is decided in the program (programs/rounds.py)
    """

    most: int

    @property
    def steps(self) -> int:
        """Levels, at most."""
        return self.most + 1

    @property
    def expansions(self) -> int:
        """Number of expanded nodes, without the root, at most."""
        return self.most


class Block(NamedTuple):
    """The positions of a block, which one pass predicts behind the root (model/layers/block.py).

    size: positions, the root included
    """

    size: int

    @property
    def steps(self) -> int:
        """Predicted positions."""
        return self.size - 1

    @property
    def expansions(self) -> int:
        """Number of expanded nodes, without the root."""
        return 0


class Stopping(NamedTuple):
    """When rounds of growth end; numbers, or in a program arrays [S].

    limit:   rounds of this session at most; -1 for padding
    pace:    seconds of a round's root and of the target's step behind it, over those of a level
    quality: log of accepted over promised draft tokens
    """

    limit: Any
    pace: Any
    quality: Any


class StepShape(NamedTuple):
    """A compiled shape of steps. heads: rows a session with candidates, either all rows or the last one.

    tree: explicit tree, growth of an adaptive one, or block, that begins at the last row in the same program
    """

    sessions: int
    rows: int
    heads: int
    tree: TreeShape | Growth | Rounds | Block | None = None

    @property
    def moves(self) -> int:
        """Rows that can move from the scratch into the prefix KV in one step."""
        return max(16, 4 * self.sessions)


class FeatureInputs(NamedTuple):
    """Inputs of models with features, int32 except `rows`. S sessions, Q rows, W width of a feature.

    rows:    [S, Q, W], the target's features; rows without one hold any numbers
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
    level_keys:    [S, L, 2] uint32, noise keys of the levels below the first that one program may give nodes
    stopping:      [S, 3] float32, as of Stopping, for rounds of growth
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
    stopping: Any
    features: FeatureInputs | None = None


class InputLayout(NamedTuple):
    """The order of the inputs of a shape among the words of a step.

    table_pages: width of the page tables; feature_width: 0 for models without features; stacked: number of stacked
    layers; chained: they read one another's states; feature_dtype: number format of the target's features
    """

    shape: StepShape
    table_pages: int
    feature_width: int = 0
    stacked: int = 0
    chained: bool = False
    feature_dtype: Any = np.dtype(np.float32)

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
            ((sessions, len(Stopping._fields) if isinstance(tree, Rounds) else 0), np.float32),
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

    features: [feed, W], of the fed rows, for models with features
    stopping: of rounds of growth
    """

    session: DraftSession
    prefix_kv: PrefixKV
    feed: int = 0
    nodes: tuple[int, ...] = ()
    features: NDArray[Any] | None = None
    stopping: Stopping | None = None


def empty_inputs(layout: InputLayout) -> StepInputs:
    """Inputs with padding alone."""
    shape = layout.shape
    words = np.zeros(layout.words(), np.int32)
    rows = np.zeros((shape.sessions, shape.rows, layout.feature_width), layout.feature_dtype)
    inputs = layout.inputs(words, rows, lambda part, kind: part.view(kind))
    inputs.head_rows[:] = np.arange(shape.heads)
    inputs.top_p[:] = 1.0
    inputs.stopping[:, :1] = -1.0
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
        if self._inputs.features is not None and self.layout.stacked:  # these keep the rows of padding, too
            self._inputs.features.rows[:] = 0
        return self._inputs


def build_inputs(step_buffer: StepBuffer, works: list[SessionWork], moves: list[tuple[int, int]]) -> StepInputs:
    """Inputs of a step. Nodes that are expanded get their scratch slots here."""
    inputs, stacked = step_buffer.cleared(), step_buffer.layout.stacked
    if moves:
        inputs.moves[:, : len(moves)] = np.array(moves, dtype=np.int32).T
    leaves = _Leaves()
    for row, work in enumerate(works):
        _describe_session(inputs, row, work)
        if work.feed:
            _feed_prefix(inputs, row, work)
        else:
            leaves.expand(row, work)
    leaves.put(inputs, moves)
    if stacked:
        for row, work in enumerate(works):
            _point_at_features(inputs, row, work, stacked)
            if step_buffer.layout.chained:
                _point_at_rows_before(inputs, row, work)
    return inputs


class _Leaves:
    """Nodes to expand, of all sessions, as lists: a conversion for each of thousands of rounds a second takes longer
    than collecting some hundred numbers."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._numbers: list[tuple[int, int, int, int, int]] = []  # token, position, slot, visible rows, parent's slot
        self._masks: list[int] = []
        self._keys: list[list[int]] = []

    def expand(self, row: int, work: SessionWork) -> None:
        """Take the nodes of a session, and give them their scratch slots."""
        session, prefix_kv = work.session, work.prefix_kv
        tree, length = session.tree, session.length
        rows = length - prefix_kv.shift  # of the prefix KV
        for column, node in enumerate(work.nodes):
            parent, depth = tree.parent[node], tree.depth[node]
            prefix_kv.expand(node, parent)
            self._rows.append(row)
            self._columns.append(column)
            self._numbers.append(
                (tree.token[node], rows - 1 + depth, prefix_kv.pool_slot(node), rows, prefix_kv.pool_slot(parent))
            )
            self._masks.append(prefix_kv.mask(node))
            self._keys.append(session.noise_keys.at(length + depth))

    def put(self, inputs: StepInputs, moves: list[tuple[int, int]]) -> None:
        """Write the nodes into the inputs. moves: of this step; parents are read before them."""
        if not self._rows:
            return
        where = np.array(self._rows), np.array(self._columns)
        # Through int64: a session may contain ids that the model lacks, and n-grams repeat them.
        tokens, positions, slots, visible, above = np.array(self._numbers).T
        inputs.tokens[where] = tokens.astype(np.uint32).view(np.int32)
        inputs.positions[where] = positions
        inputs.slots[where] = slots
        inputs.visible[where] = visible
        inputs.scratch_bits[where] = np.array(self._masks, np.uint64).view(np.uint32).reshape(-1, MASK_WORDS)
        inputs.keys[where] = np.array(self._keys, np.uint32)
        if inputs.features is not None and inputs.features.layers is None:
            moved = {target: source for source, target in moves}
            inputs.features.sources[where] = [moved.get(slot, slot) for slot in above.tolist()] if moved else above


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
        parents = work.session.tree.parent
        before = np.array([work.prefix_kv.pool_slot(parents[node]) for node in work.nodes])
    else:
        wanted = inputs.positions[row, : work.feed] - 1
        slots = work.prefix_kv.table.slots(0, work.prefix_kv.settled + work.feed)
        before = np.where(wanted >= 0, slots[np.maximum(wanted, 0)], 0)
    inputs.features.sources[row, : len(before), 1:] = before[:, None]


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
    if work.stopping is not None:
        inputs.stopping[row] = work.stopping
    if inputs.features is not None:
        assert work.features is not None, "rows of the prefix KV are computed from the target's features"
        inputs.features.rows[row, : work.feed] = work.features
        inputs.features.given[row, : work.feed] = True
