"""Ragged paged attention in Pallas for TPUs, compiled by Mosaic; copies of the next pages overlap with computation.

A program processes M of a session's lanes, which are its rows times the query heads of a key head, with all key heads,
and walks over the session's own pages, N keys at a time. Page ids and bounds are in scalar memory: a copy starts
while the block before is multiplied; pages that no lane sees are not read.

    lanes       row 0: head 0 .. G-1 | row 1: head 0 .. G-1 | ...      M a program, of each key head
    keys        scratch, if a lane sees any of it | since ... visible, in blocks of N

Pools for this kernel hold heads padded with zeros to a multiple of 128 (pallas_backend.with_cache_for).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from services.draft.kernels.base import Context

_NOTHING = -1e30
_LANE = 128  # width of a register's row
_MAX_KEYS = 256  # of a block, unless a page is larger
_MAX_LANES = 256  # of a program
# Bytes of vector memory for two blocks of keys, and for the state of the lanes; there are 16 MiB by default.
_KEY_BYTES = 4 << 20
_LANE_BYTES = 6 << 20


class _Lanes(NamedTuple):
    """The split of a step's lanes. group: query heads of a key head; lanes: of a session; taken: lanes of a
    program; blocks: programs of a session.
    """

    group: int
    lanes: int
    taken: int
    blocks: int

    @property
    def missing(self) -> int:
        """Padding lanes at the end of the last block."""
        return self.blocks * self.taken - self.lanes

    def of_rows(self, x: jax.Array, fill: Any) -> jax.Array:
        """[S, Q, ...] to [S, lanes, ...]."""
        x = jnp.repeat(x, self.group, axis=1)
        return jnp.pad(x, ((0, 0), (0, self.missing), *((0, 0),) * (x.ndim - 2)), constant_values=fill)

    def of_queries(self, q: jax.Array, width: int) -> jax.Array:
        """[S, Q, heads, D] to [S, kv_heads, lanes, width]."""
        sessions, rows, heads, dim = q.shape
        kv_heads = heads // self.group
        grouped = q.reshape(sessions, rows, kv_heads, self.group, dim).transpose(0, 2, 1, 3, 4)
        grouped = grouped.reshape(sessions, kv_heads, self.lanes, dim)
        return jnp.pad(grouped, ((0, 0), (0, 0), (0, self.missing), (0, width - dim)))

    def of_sinks(self, sinks: jax.Array, rows: int) -> jax.Array:
        """[heads] to [kv_heads, lanes, 1]."""
        each = sinks.astype(jnp.float32).reshape(-1, 1, self.group)
        each = jnp.tile(each, (1, rows, 1)).reshape(len(each), self.lanes)
        return jnp.pad(each, ((0, 0), (0, self.missing)))[..., None]

    def spec(self, *shape: int) -> pl.BlockSpec:
        """The program's lanes of [S, (K,) lanes, ...]; shape: of the block without the session."""
        index = [0] * len(shape)

        def place(session: Any, block: Any, *_: Any) -> tuple[Any, ...]:
            at: list[Any] = list(index)
            at[shape.index(self.taken) if shape[0] == self.taken else 1] = block
            return session, *at

        return pl.BlockSpec((1, *shape), place)


def tpu_attention(
    q: jax.Array,
    pool: jax.Array,
    context: Context,
    page_size: int,
    *,
    since: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As of model.layers.backend.attention, for pools of padded heads; scratch slots follow their pages in order."""
    sessions, rows, heads, dim = q.shape
    _, _, kv_heads, width = pool.shape
    view, sides_last = _view(pool)
    count = context.scratch_slots.shape[1]
    lanes = _cut(rows * (heads // kv_heads), heads // kv_heads, kv_heads, width)
    grouped = lanes.of_queries(q, width)
    visible = lanes.of_rows(context.visible, 0)
    first = jnp.zeros_like(visible) if since is None else lanes.of_rows(since, 2**30)
    mask = lanes.of_rows(context.scratch_mask.astype(jnp.int32), 0)
    sink = None if sinks is None else lanes.of_sinks(sinks, rows)
    run = math.gcd(page_size, count)
    blocks = (sessions, lanes.blocks, lanes.taken)
    scalars = (
        context.pages,
        visible.reshape(blocks).max(axis=-1),
        first.reshape(blocks).min(axis=-1),
        context.scratch_slots[:, ::run],
        mask.reshape(*blocks[:2], -1).max(axis=-1),
    )
    pages_a_block = max(_keys(view) // page_size, 1)
    kernel = partial(
        _kernel, page_size=page_size, pages_a_block=pages_a_block, run=run, count=count, scale=dim**-0.5,
        softcap=softcap, has_sinks=sink is not None,
        sides_last=sides_last,
    )  # fmt: skip
    reached = mask.reshape(*blocks, count).max(axis=2)[..., None]
    inputs = [grouped, view, visible[..., None], first[..., None], mask, reached, *([] if sink is None else [sink])]
    keys = pl.cdiv(max(pages_a_block * page_size, count), _LANE) * _LANE
    output = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=blocks[:2],
            in_specs=_input_specs(lanes, kv_heads, width, count)[: len(inputs)],
            out_specs=lanes.spec(kv_heads, lanes.taken, width),
            scratch_shapes=[
                pltpu.VMEM((2, keys, *view.shape[1:]), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((kv_heads, lanes.taken, _LANE), jnp.float32),
                pltpu.VMEM((kv_heads, lanes.taken, _LANE), jnp.float32),
                pltpu.VMEM((kv_heads, lanes.taken, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        interpret=interpret,
        name="ragged_paged_attention",
    )(*scalars, *inputs)
    output = output[:, :, : lanes.lanes, :dim].reshape(sessions, kv_heads, rows, lanes.group, dim)
    attended: jax.Array = output.transpose(0, 2, 1, 3, 4).reshape(q.shape)
    return attended


def _input_specs(lanes: _Lanes, kv_heads: int, width: int, count: int) -> list[pl.BlockSpec]:
    """Of queries, pool, bounds, the scratch's mask, the union of the masks of all lanes, and sinks."""
    return [
        lanes.spec(kv_heads, lanes.taken, width),
        pl.BlockSpec(memory_space=pl.ANY),
        lanes.spec(lanes.taken, 1),
        lanes.spec(lanes.taken, 1),
        lanes.spec(lanes.taken, count),
        pl.BlockSpec((1, 1, count, 1), lambda session, block, *_: (session, block, 0, 0)),
        pl.BlockSpec((kv_heads, lanes.taken, 1), lambda *at: (0, at[1], 0)),
    ]


def _cut(count: int, group: int, kv_heads: int, width: int) -> _Lanes:
    """A program processes all lanes of a session, or as many as its memory holds."""
    most = _LANE_BYTES // (kv_heads * (8 * width + 4 * 2 * _LANE)) // 16 * 16
    taken = max(min(_MAX_LANES, most, pl.cdiv(count, 16) * 16), 16)
    return _Lanes(group, count, taken, pl.cdiv(count, taken))


def _keys(view: jax.Array) -> int:
    """Keys of a block."""
    return min(_MAX_KEYS, _KEY_BYTES // (2 * math.prod(view.shape[1:]) * view.dtype.itemsize))


def _view(pool: jax.Array) -> tuple[jax.Array, bool]:
    """The pool in the layout that XLA chose, so that it is not copied: [slots, D] of shared keys and values; [slots,
    kv_heads, 2, D], and True, for packed heads that fill no tile; otherwise unchanged.
    """
    slots, sides, kv_heads, width = pool.shape
    if sides == 1:
        assert kv_heads == 1, "keys that are their own values have one head"
        return pool.reshape(slots, width), False
    if pool.dtype.itemsize < 4 and kv_heads not in (2, 4) and kv_heads % 8:
        return pool.transpose(0, 2, 1, 3), True
    return pool, False


class _Buffers(NamedTuple):
    """The pool, two buffers of keys [2, N, ...] that are filled from it, and a semaphore for each of them."""

    pool: Any
    keys: Any
    arrived: Any

    def copy(self, slot: Any, count: int, place: Any, buffer: Any) -> Any:
        """The copy of consecutive slots into a buffer."""
        source = self.pool.at[pl.ds(pl.multiple_of(slot, count), count)]
        target = self.keys.at[buffer, pl.ds(pl.multiple_of(place * count, count), count)]
        return pltpu.make_async_copy(source, target, self.arrived.at[buffer])

    def head(self, buffer: Any, head: int, *, sides_last: bool) -> tuple[jax.Array, jax.Array]:
        """Keys and values of a head in a buffer, [N, D]."""
        if self.keys.ndim == 3:
            shared = self.keys[buffer]
            return shared, shared
        if sides_last:
            return self.keys[buffer, :, head, 0, :], self.keys[buffer, :, head, 1, :]
        return self.keys[buffer, :, 0, head, :], self.keys[buffer, :, 1, head, :]


class _Running(NamedTuple):
    """Online softmax over the keys so far, in memory: [K, M, 128] with equal columns twice, and [K, M, D]."""

    maximum: Any
    total: Any
    output: Any

    def clear(self, sink_ref: Any) -> None:
        """The state before any key; a sink [K, M, 1] is a key without a value."""
        if sink_ref is None:
            self.maximum[...] = jnp.full(self.maximum.shape, _NOTHING, jnp.float32)
            self.total[...] = jnp.zeros(self.total.shape, jnp.float32)
        else:
            self.maximum[...] = jnp.broadcast_to(sink_ref[...], self.maximum.shape)
            self.total[...] = jnp.ones(self.total.shape, jnp.float32)
        self.output[...] = jnp.zeros(self.output.shape, jnp.float32)

    def take(self, head: int, scores: jax.Array, value: jax.Array, mask: jax.Array) -> None:
        """Accumulate keys of a head. scores, mask: [M, N]; value: [N, D]."""
        scores = jnp.where(mask, scores, _NOTHING)
        before = self.maximum[head][:, :1]
        maximum = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        p = jnp.where(mask, jnp.exp(scores - maximum), 0.0)
        decay = jnp.exp(before - maximum)
        total = self.total[head][:, :1] * decay + p.sum(axis=1, keepdims=True)
        seen = lax.dot_general(
            p.astype(value.dtype), value, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        self.output[head] = self.output[head] * decay + seen
        self.maximum[head] = jnp.broadcast_to(maximum, self.maximum.shape[1:])
        self.total[head] = jnp.broadcast_to(total, self.total.shape[1:])


def _kernel(
    pages_ref: Any,
    last_ref: Any,
    first_ref: Any,
    scratch_ref: Any,
    drafted_ref: Any,
    q_ref: Any,
    pool_ref: Any,
    visible_ref: Any,
    since_ref: Any,
    mask_ref: Any,
    reached_ref: Any,
    *refs: Any,
    page_size: int,
    pages_a_block: int,
    run: int,
    count: int,
    scale: float,
    softcap: float | None,
    has_sinks: bool,
    sides_last: bool,
) -> None:
    """One program."""
    out_ref, keys_ref, arrived, *softmax_refs = refs[has_sinks:]
    buffers, running = _Buffers(pool_ref, keys_ref, arrived), _Running(*softmax_refs)
    session, block = pl.program_id(0), pl.program_id(1)
    keys, reach = keys_ref.shape[1], pages_a_block * page_size
    last, first = last_ref[session, block], first_ref[session, block]
    begin, end = lax.div(jnp.minimum(first, last), reach), lax.div(last + reach - 1, reach)

    def for_pages(i: Any, buffer: Any, verb: str) -> None:
        """Start the copies of block i, or wait for them. Pages that no lane sees are left out."""

        def page(j: Any, _: None) -> None:
            copy = buffers.copy(pages_ref[session, j] * page_size, page_size, j - i * pages_a_block, buffer)
            getattr(copy, verb)()

        most = jnp.minimum(lax.div(last + page_size - 1, page_size), (i + 1) * pages_a_block)
        lax.fori_loop(jnp.maximum(lax.div(first, page_size), i * pages_a_block), most, page, None)

    def for_scratch(verb: str) -> None:
        """The same for the scratch, in the buffer that the first block of the prefix KV leaves free."""

        def piece(j: Any, _: None) -> None:
            getattr(buffers.copy(scratch_ref[session, j], run, j, 1 - lax.rem(begin, 2)), verb)()

        lax.fori_loop(0, count // run, piece, None)

    def take(buffer: Any, mask: jax.Array, there: jax.Array) -> None:
        """Accumulate a buffer's keys. mask: [M, N], keys that lanes see; there: [N, 1], keys that any lane sees."""
        for head in range(q_ref.shape[1]):
            key, value = buffers.head(buffer, head, sides_last=sides_last)
            value = jnp.where(there, value, 0)
            scores = _scores(q_ref[0, head], key, scale, softcap)
            running.take(head, scores, value, mask)

    running.clear(refs[0] if has_sinks else None)
    drafted = drafted_ref[session, block] > 0
    pl.when(drafted)(lambda: for_scratch("start"))
    pl.when(begin < end)(lambda: for_pages(begin, lax.rem(begin, 2), "start"))

    @pl.when(drafted)
    def _() -> None:
        for_scratch("wait")
        mask = jnp.pad(mask_ref[0], ((0, 0), (0, keys - count))) > 0
        take(1 - lax.rem(begin, 2), mask, jnp.pad(reached_ref[0, 0], ((0, keys - count), (0, 0))) > 0)

    def body(i: Any, carry: None) -> None:
        buffer = lax.rem(i, 2)
        pl.when(i + 1 < end)(lambda: for_pages(i + 1, 1 - buffer, "start"))
        for_pages(i, buffer, "wait")
        start, stop = i * reach, (i + 1) * reach
        position = start + lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        mask = (position < jnp.minimum(stop, visible_ref[0])) & (position >= since_ref[0])
        place = start + lax.broadcasted_iota(jnp.int32, (keys, 1), 0)
        take(buffer, mask, (place < jnp.minimum(stop, last)) & (place >= first))
        return carry

    lax.fori_loop(begin, end, body, None)
    out_ref[0] = (running.output[...] / jnp.maximum(running.total[...][:, :, :1], 1e-30)).astype(out_ref.dtype)


def _scores(q: jax.Array, key: jax.Array, scale: float, softcap: float | None) -> jax.Array:
    """Scores [M, N] of queries [M, D] and keys [N, D]."""
    scores = lax.dot_general(q, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
    return scores if softcap is None else softcap * jnp.tanh(scores / softcap)
