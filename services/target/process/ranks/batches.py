"""A batch as arrays of integers, which rank 0 broadcasts in every step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.target.process.ranks.channel import Channel
from services.target.step.batch import Batch, Capture, DeferredRoots, TokenArrays
from services.target.step.layout import Layout
from services.target.step.upload import upload

_HEADER = 10


def pack(batch: Batch) -> list[NDArray[np.integer]]:
    """The arrays of a batch, without the parts that only rank 0 needs, such as how tokens are sampled."""
    rows, spans, capture = batch.rows, batch.layout, batch.capture
    layers = np.array([] if capture is None else capture.layers, np.int64)
    roots = np.zeros(0, np.int64) if batch.roots is None else batch.roots.rows
    header = np.array([
        len(rows.ids), len(rows.sampled), batch.sample_count, len(spans), len(spans.pages), len(spans.parents),
        spans.page_size, len(layers), capture is not None and capture.final, len(roots),
    ])  # fmt: skip
    tokens = [rows.ids, rows.positions, rows.sampled]
    return [header, *tokens, spans.start, spans.committed, spans.nodes, spans.pages, spans.parents, layers, roots]


def unpack(body: NDArray[np.int64], device: torch.device, channel: Channel) -> Batch:
    """The inverse of `pack`. Receives the roots that only the device knows.

    The states that rank 0 captures are captured by every rank, so that all replay the same captured step.
    """
    count, sampled, drawn, spans, pages, parents, page_size, layers, final, roots = body[:_HEADER].tolist()
    take = _Reader(body[_HEADER:])
    rows = TokenArrays(take(count), take(count), take(sampled))
    columns = take(spans), take(spans), take(spans)
    layout = Layout.of(*columns, take(pages).astype(np.int32), take(parents).astype(np.int32), page_size)
    capture = Capture(tuple(take(layers).tolist()), bool(final), None) if layers or final else None
    batch = Batch(layout, rows, device, drawn, capture)
    if not roots:
        return batch
    tokens = torch.empty(roots, dtype=torch.int64, device=device)
    channel.share(tokens)
    return replace(batch, roots=DeferredRoots(take(roots), np.arange(roots), tokens))


def share_roots(roots: DeferredRoots, channel: Channel) -> None:
    """Send the ids of roots that only rank 0's device knows."""
    (sources,) = upload([roots.sources], roots.tokens.device)
    channel.share(roots.tokens.index_select(0, sources))


class _Reader:
    """Reads arrays from the front of a concatenated one."""

    def __init__(self, body: NDArray[np.int64]) -> None:
        self._body = body

    def __call__(self, count: int) -> NDArray[np.int64]:
        taken, self._body = self._body[:count], self._body[count:]
        return taken
