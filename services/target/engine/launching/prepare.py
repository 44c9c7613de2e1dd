"""From the host's plan of a prepared step to the spans on the device, and their places in its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.serving.session import Session
from outrider.speculation import noise
from services.target.model.base import Runner
from services.target.step.batch import Batch, SessionWork
from services.target.step.prepared import PreparedSpans, RowMaps, TreeTables


def takes_prepared_spans(runner: Runner) -> bool:
    """True if a runner's attention follows what the device has chosen."""
    return bool(getattr(getattr(runner, "planner", None), "takes_prepared_spans", False))


def prepare(
    batch: Batch,
    works: Sequence[SessionWork],
    sessions: Sequence[Session],
    samples: Tensor,
    tables: TreeTables,
    *,
    follows: bool,
) -> tuple[Batch, PreparedSpans]:
    """The batch of a prepared step, and its prepared spans. Sessions count their expected token.

    works: of the batch; sessions: of the tables; samples: of the step in flight, on the device; follows: the runner's
    attention takes prepared spans from the device
    """
    reaches = {work.chunk.session.id: work.reach or 0 for work in works}
    longest = [reaches[session.id] for session in sessions]
    maps = RowMaps(
        *_places(batch, works, sessions, tables.width), _pages(sessions, longest, tables.width),
        _keys(sessions, max(longest) + tables.width + 1),
    )  # fmt: skip
    prepared = spans_for(batch.device)(samples, tables, maps, batch.layout.page_size)
    if batch.device.type == "cpu" and not follows:
        return batch.settled(prepared), prepared
    return replace(batch, prepared=prepared), prepared


def spans_for(device: torch.device) -> type[PreparedSpans]:
    """The kind of prepared spans that suits a device."""
    if device.type != "cuda":
        return PreparedSpans
    from services.target.kernels.cuda.prepared_spans import FusedSpans

    return FusedSpans


def _places(
    batch: Batch, works: Sequence[SessionWork], sessions: Sequence[Session], width: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The first three of RowMaps."""
    order = {session.id: one for one, session in enumerate(sessions)}
    cells: list[int] = []
    rows: list[int] = []
    samples: list[int] = []
    node_cells: list[int] = []
    nodes: list[int] = []
    firsts = np.zeros((3, len(sessions)), np.int64)
    sample = node = 0
    for work, first in zip(works, batch.layout.first.tolist(), strict=False):
        count = len(work.draft)
        if work.reach is not None:
            one = order[work.chunk.session.id]
            firsts[:, one] = first, sample, node
            cells += range(one * (width + 1), one * (width + 1) + count + 1)
            rows += range(first, first + count + 1)
            samples += range(sample, sample + count + 1)
            node_cells += range(one * width, one * width + count)
            nodes += range(node, node + count)
        sample += count + 1 if work.chunk.last else 0
        node += count
    return firsts, np.array([cells, rows, samples], np.int64), np.array([node_cells, nodes], np.int64)


def _pages(sessions: Sequence[Session], reaches: Sequence[int], width: int) -> NDArray[np.int64]:
    """The pages of RowMaps. Those that a session has not leased are 0: no row of its span lies there."""
    size = sessions[0].table.page_size
    firsts = [(session.length - 1) // size for session in sessions]
    lasts = [(session.length - 1 + reach + width) // size for session, reach in zip(sessions, reaches, strict=True)]
    most = max(last - first for first, last in zip(firsts, lasts, strict=True)) + 1
    pages = np.zeros((len(sessions), most + 1), np.int64)
    for row, session, first in zip(pages, sessions, firsts, strict=True):
        held = session.table.pages[first : first + most]
        row[0], row[1 : 1 + len(held)] = first, held
    return pages


def _keys(sessions: Sequence[Session], count: int) -> NDArray[np.int64]:
    """The noise keys of RowMaps: of the positions behind each session's expected token."""
    if all(session.sampling.greedy for session in sessions):
        return np.zeros((0, count, 2), np.int64)
    keys = np.zeros((len(sessions), count, 2), np.int64)
    for row, session in zip(keys, sessions, strict=True):
        if not session.sampling.greedy:
            row[:] = noise.position_keys(session.sampling.seed, np.arange(session.length, session.length + count))
    return keys
