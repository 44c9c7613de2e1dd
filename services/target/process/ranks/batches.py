"""A batch as arrays of integers, which rank 0 broadcasts in every step.

Of prepared spans the trees and the places in the batch are broadcast, too: every rank walks them along the samples of
the step in flight, which go from device to device, and finds the same draft tokens. Noise keys stay with rank 0.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.target.engine.launching.prepare import spans_for
from services.target.process.ranks.channel import Channel
from services.target.step.batch import Batch, Capture, DeferredRoots, TokenArrays
from services.target.step.layout import Layout
from services.target.step.prepared import MAX_NODES, PreparedSpans, RowMaps, TreeTables
from services.target.step.upload import upload

_HEADER = 11
_SPANS = 5  # numbers that precede the arrays of prepared spans


def pack(batch: Batch) -> list[NDArray[np.integer]]:
    """The arrays of a batch, without the parts that only rank 0 needs, such as how tokens are sampled."""
    rows, spans, capture = batch.rows, batch.layout, batch.capture
    layers = np.array([] if capture is None else capture.layers, np.int64)
    roots = np.zeros(0, np.int64) if batch.roots is None else batch.roots.rows
    header = np.array([
        len(rows.ids), len(rows.sampled), batch.sample_count, len(spans), len(spans.pages), len(spans.parents),
        spans.page_size, len(layers), capture is not None and capture.final, len(roots), batch.prepared is not None,
    ])  # fmt: skip
    tokens = [rows.ids, rows.positions, rows.sampled]
    slack = np.zeros(len(spans), np.int64) if spans.slack is None else spans.slack
    columns = [spans.start, spans.committed, spans.nodes, slack]
    prepared = [] if batch.prepared is None else _pack_spans(batch.prepared)
    return [header, *tokens, *columns, spans.pages, spans.parents, layers, roots, *prepared]


def _pack_spans(prepared: PreparedSpans) -> list[NDArray[np.integer]]:
    """The arrays of prepared spans but for the noise keys."""
    maps = prepared.maps
    sizes = [len(prepared), maps.rows.shape[1], maps.nodes.shape[1], maps.pages.shape[1], len(prepared.taken)]
    arrays = [prepared.tables.nodes, prepared.tables.sessions, maps.firsts, maps.rows, maps.nodes, maps.pages]
    return [np.array(sizes), *(array.reshape(-1) for array in arrays)]


def unpack(body: NDArray[np.int64], device: torch.device, channel: Channel) -> Batch:
    """The inverse of `pack`. Receives what only the device knows: roots, or the samples that spans are chosen by.

    The states that rank 0 captures are captured by every rank, so that all replay the same captured step.
    """
    count, sampled, drawn, spans, pages, parents, page_size, layers, final, roots, prepared = body[:_HEADER].tolist()
    take = _Reader(body[_HEADER:])
    rows = TokenArrays(take(count), take(count), take(sampled))
    start, committed, nodes, slack = (take(spans) for _ in range(4))
    tables = take(pages).astype(np.int32), take(parents).astype(np.int32)
    layout = Layout.of(start, committed, nodes, *tables, page_size, slack if slack.any() else None)
    capture = Capture(tuple(take(layers).tolist()), bool(final), None) if layers or final else None
    batch = Batch(layout, rows, device, drawn, capture)
    rows_of_roots = take(roots)
    if prepared:
        return replace(batch, prepared=_unpack_spans(take, page_size, device, channel))
    if not roots:
        return batch
    tokens = torch.empty(roots, dtype=torch.int64, device=device)
    channel.share(tokens)
    return replace(batch, roots=DeferredRoots(rows_of_roots, np.arange(roots), tokens))


def _unpack_spans(take: _Reader, page_size: int, device: torch.device, channel: Channel) -> PreparedSpans:
    """The inverse of `_pack_spans`; receives the samples."""
    count, rows, nodes, pages, sampled = take(_SPANS).tolist()
    tables = TreeTables(
        take(5 * count * MAX_NODES).reshape(5, count, MAX_NODES), take(4 * count).reshape(4, count),
        np.zeros((count, MAX_NODES)),
    )  # fmt: skip
    maps = RowMaps(
        take(3 * count).reshape(3, count), take(3 * rows).reshape(3, rows), take(2 * nodes).reshape(2, nodes),
        take(count * pages).reshape(count, pages), np.zeros((0, 1, 2), np.int64),
    )  # fmt: skip
    samples = torch.empty(sampled, dtype=torch.int64, device=device)
    channel.share(samples)
    return spans_for(device)(samples, tables, maps, page_size)


def share_unknown(batch: Batch, channel: Channel) -> None:
    """Send what only rank 0's device knows: the ids of roots, or the samples that spans are chosen by."""
    if batch.roots is not None:
        (sources,) = upload([batch.roots.sources], batch.roots.tokens.device)
        channel.share(batch.roots.tokens.index_select(0, sources))
    if batch.prepared is not None:
        channel.share(batch.prepared.taken.contiguous())


class _Reader:
    """Reads arrays from the front of a concatenated one."""

    def __init__(self, body: NDArray[np.int64]) -> None:
        self._body = body

    def __call__(self, count: int) -> NDArray[np.int64]:
        taken, self._body = self._body[:count], self._body[count:]
        return taken
