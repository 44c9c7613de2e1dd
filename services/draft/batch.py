"""The arrays of one step of the draft model, built on the host. Page ids are inputs and never live on the device.

Every step has one of a few shapes, each compiled once: S sessions with Q rows each. Rows that are not needed read and
write the null page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.draft.session import DraftSession
from services.draft.trunk import SCRATCH_SLOTS, Trunk

MASK_WORDS = SCRATCH_SLOTS // 32


class Shape(NamedTuple):
    """A compiled shape. heads: rows a session that give candidates; either all of them or the last one alone."""

    sessions: int
    rows: int
    heads: int

    @property
    def moves(self) -> int:
        """Rows that can move from scratch to trunk in one step."""
        return max(16, 4 * self.sessions)


class StepInputs(NamedTuple):
    """Inputs of the step program, int32 unless said otherwise. S sessions, Q rows, R rows with candidates, M moves.

    tokens, positions, slots, visible: [S, Q], visible in trunk tokens; head_rows: [S, R], rows that give candidates;
    pages: [S, P]; scratch_slots: [S, C]; scratch_bits: [S, Q, C / 32] uint32; moves: [2, M], source and target slots;
    temperature, top_p, min_p: [S] float32; top_k: [S]; keys: [S, R, 2] uint32
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


@dataclass(frozen=True)
class Job:
    """What a step does for one session: the next `feed` tokens of the trunk, or the expansion of nodes."""

    session: DraftSession
    trunk: Trunk
    feed: int = 0
    nodes: tuple[int, ...] = ()


def empty_inputs(shape: Shape, table_pages: int) -> StepInputs:
    """Inputs of padding alone. table_pages: width of the page tables."""
    sessions, rows, heads = shape

    def ints(*size: int) -> NDArray[np.int32]:
        return np.zeros(size, dtype=np.int32)

    return StepInputs(
        tokens=ints(sessions, rows),
        positions=ints(sessions, rows),
        slots=ints(sessions, rows),
        visible=ints(sessions, rows),
        head_rows=np.tile(np.arange(heads, dtype=np.int32), (sessions, 1)),
        pages=ints(sessions, table_pages),
        scratch_slots=ints(sessions, SCRATCH_SLOTS),
        scratch_bits=np.zeros((sessions, rows, MASK_WORDS), dtype=np.uint32),
        moves=ints(2, shape.moves),
        temperature=np.zeros(sessions, dtype=np.float32),
        top_p=np.ones(sessions, dtype=np.float32),
        min_p=np.zeros(sessions, dtype=np.float32),
        top_k=ints(sessions),
        keys=np.zeros((sessions, heads, 2), dtype=np.uint32),
    )


def build_inputs(shape: Shape, table_pages: int, jobs: list[Job], moves: list[tuple[int, int]]) -> StepInputs:
    """Inputs of a step. Nodes that it expands get their scratch slots here."""
    inputs = empty_inputs(shape, table_pages)
    if moves:
        inputs.moves[:, : len(moves)] = np.array(moves, dtype=np.int32).T
    for row, job in enumerate(jobs):
        _describe_session(inputs, row, job)
        if job.feed:
            _feed_trunk(inputs, row, job)
        else:
            _expand_nodes(inputs, row, job)
    return inputs


def _describe_session(inputs: StepInputs, row: int, job: Job) -> None:
    pages = job.trunk.table.pages
    inputs.pages[row, : len(pages)] = pages
    inputs.scratch_slots[row] = job.trunk.scratch.slots(0, SCRATCH_SLOTS)
    sampling = job.session.sampling
    inputs.temperature[row] = sampling.temperature
    inputs.top_p[row] = sampling.top_p
    inputs.min_p[row] = sampling.min_p
    inputs.top_k[row] = min(sampling.top_k, 2**31 - 1)


def _feed_trunk(inputs: StepInputs, row: int, job: Job) -> None:
    start, stop = job.trunk.computed, job.trunk.computed + job.feed
    positions = np.arange(start, stop)
    inputs.tokens[row, : job.feed] = job.session.tokens[start:stop]
    inputs.positions[row, : job.feed] = positions
    inputs.slots[row, : job.feed] = job.trunk.table.slots(start, stop)
    inputs.visible[row, : job.feed] = positions + 1
    # The last fed row stands first among those that give candidates.
    inputs.head_rows[row, 0] = job.feed - 1
    inputs.keys[row, 0] = job.session.keys(np.array([stop]))[0]


def _expand_nodes(inputs: StepInputs, row: int, job: Job) -> None:
    tree, count = job.session.tree, len(job.nodes)
    length = job.session.length
    slots = [job.trunk.expand(node, tree.parent[node]) for node in job.nodes]
    depths = np.array([tree.depth[node] for node in job.nodes])
    inputs.tokens[row, :count] = [tree.token[node] for node in job.nodes]
    inputs.positions[row, :count] = length - 1 + depths
    inputs.slots[row, :count] = inputs.scratch_slots[row, slots]
    inputs.visible[row, :count] = length
    for i, node in enumerate(job.nodes):
        mask = job.trunk.mask(node)
        inputs.scratch_bits[row, i] = [mask >> 32 * word & 0xFFFFFFFF for word in range(MASK_WORDS)]
    inputs.keys[row, :count] = job.session.keys(length + depths)
