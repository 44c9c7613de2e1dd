"""Ragged paged attention in Pallas for TPUs: pages are copied from the device's memory while those before are used.

A program takes M of a session's lanes, which are its rows times the query heads of a key head, with all key heads, and
walks over the session's own pages, N keys at a time. Page ids and bounds are in scalar memory, so that a copy starts
while the block before is multiplied; pages that no lane sees are not read.

    lanes       row 0: head 0 .. G-1 | row 1: head 0 .. G-1 | ...      M a program, of each key head
    keys        scratch, if a lane sees any of it | since ... visible, in blocks of N

Pools for this kernel hold heads filled up with zeros to a multiple of 128 (accelerators.with_cache_for).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from services.draft.kernels.base import Context

_NOTHING = -1e30
_LANE = 128  # numbers of a register's row
_MOST_KEYS = 256  # of a block, unless a page is larger
_MOST_LANES = 256  # of a program
# Bytes of the fast memory for two blocks of keys, and for what lanes carry along; there are 16 MiB by default.
_KEY_BYTES = 4 << 20
_LANE_BYTES = 6 << 20


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
    """As of kernels.attention, for pools whose heads fill registers; scratch slots go through their pages in order."""
    sessions, rows, heads, dim = q.shape
    _, _, kv_heads, width = pool.shape
    group = heads // kv_heads
    lanes = rows * group
    view, sides_last = _view(pool)
    count = context.scratch_slots.shape[1]
    taken = _lanes(lanes, kv_heads, width)
    blocks = pl.cdiv(lanes, taken)
    total = blocks * taken

    def by_lane(x: jax.Array, fill: Any) -> jax.Array:
        """[S, Q, ...] to [S, lanes, ...]."""
        x = jnp.repeat(x, group, axis=1)
        return jnp.pad(x, ((0, 0), (0, total - lanes), *((0, 0),) * (x.ndim - 2)), constant_values=fill)

    grouped = q.reshape(sessions, rows, kv_heads, group, dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(sessions, kv_heads, lanes, dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, total - lanes), (0, width - dim)))
    visible = by_lane(context.visible, 0)
    first = jnp.zeros_like(visible) if since is None else by_lane(since, 2**30)
    mask = by_lane(context.scratch_mask.astype(jnp.int32), 0)
    sink = None
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, 1, group), (1, rows, 1)).reshape(kv_heads, lanes)
        sink = jnp.pad(sink, ((0, 0), (0, total - lanes)))[..., None]

    run = math.gcd(page_size, count)
    scalars = (
        context.pages,
        visible.reshape(sessions, blocks, taken).max(axis=-1),
        first.reshape(sessions, blocks, taken).min(axis=-1),
        context.scratch_slots[:, ::run],
        mask.reshape(sessions, blocks, -1).max(axis=-1),
    )
    pages_a_block = max(_keys(view) // page_size, 1)
    keys = pl.cdiv(max(pages_a_block * page_size, count), _LANE) * _LANE
    kernel = partial(
        _kernel, page_size=page_size, pages_a_block=pages_a_block, run=run, count=count, scale=dim**-0.5,
        softcap=softcap, has_sinks=sink is not None,
        sides_last=sides_last,
    )  # fmt: skip

    def block_of(*shape: int) -> pl.BlockSpec:
        """The program's lanes of [S, (K,) lanes, ...]; shape: of the block without the session."""
        index = [0] * len(shape)

        def place(session: Any, block: Any, *_: Any) -> tuple[Any, ...]:
            at: list[Any] = list(index)
            at[shape.index(taken) if shape[0] == taken else 1] = block
            return session, *at

        return pl.BlockSpec((1, *shape), place)

    reached = mask.reshape(sessions, blocks, taken, count).max(axis=2)[..., None]
    inputs = [grouped, view, visible[..., None], first[..., None], mask, reached]
    specs = [
        block_of(kv_heads, taken, width),
        pl.BlockSpec(memory_space=pl.ANY),
        block_of(taken, 1),
        block_of(taken, 1),
        block_of(taken, count),
        pl.BlockSpec((1, 1, count, 1), lambda session, block, *_: (session, block, 0, 0)),
    ]
    if sink is not None:
        inputs.append(sink)
        specs.append(pl.BlockSpec((kv_heads, taken, 1), lambda *at: (0, at[1], 0)))
    output = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(sessions, blocks),
            in_specs=specs,
            out_specs=block_of(kv_heads, taken, width),
            scratch_shapes=[
                pltpu.VMEM((2, keys, *view.shape[1:]), pool.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((kv_heads, taken, _LANE), jnp.float32),
                pltpu.VMEM((kv_heads, taken, _LANE), jnp.float32),
                pltpu.VMEM((kv_heads, taken, width), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, q.dtype),
        interpret=interpret,
        name="ragged_paged_attention",
    )(*scalars, *inputs)
    output = output[:, :, :lanes, :dim].reshape(sessions, kv_heads, rows, group, dim)
    return output.transpose(0, 2, 1, 3, 4).reshape(q.shape)


def _lanes(lanes: int, kv_heads: int, width: int) -> int:
    """Lanes of a program: as many as there are, or as its memory holds."""
    most = _LANE_BYTES // (kv_heads * (8 * width + 4 * 2 * _LANE)) // 16 * 16
    return max(min(_MOST_LANES, most, pl.cdiv(lanes, 16) * 16), 16)


def _keys(view: jax.Array) -> int:
    """Keys of a block."""
    return min(_MOST_KEYS, _KEY_BYTES // (2 * math.prod(view.shape[1:]) * view.dtype.itemsize))


def _view(pool: jax.Array) -> tuple[jax.Array, bool]:
    """The pool as XLA lays it out, so that it need not be copied: [slots, D] of shared keys and values; else [slots,
    kv_heads, 2, D], and True, for numbers of packed heads that fill no tile; else as it is.
    """
    slots, sides, kv_heads, width = pool.shape
    if sides == 1:
        assert kv_heads == 1, "keys that are their own values have one head"
        return pool.reshape(slots, width), False
    if pool.dtype.itemsize < 4 and kv_heads not in (2, 4) and kv_heads % 8:
        return pool.transpose(0, 2, 1, 3), True
    return pool, False


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
    sink_ref = refs[0] if has_sinks else None
    out_ref, buffers, arrived, maximum_ref, total_ref, output_ref = refs[has_sinks:]
    session, block = pl.program_id(0), pl.program_id(1)
    kv_heads, keys = q_ref.shape[1], buffers.shape[1]
    reach = pages_a_block * page_size
    last, first = last_ref[session, block], first_ref[session, block]
    begin, end = lax.div(jnp.minimum(first, last), reach), lax.div(last + reach - 1, reach)

    def copy(slot: Any, count: int, place: Any, buffer: Any) -> Any:
        """The copy of slots that lie together, to places of a buffer."""
        source = pool_ref.at[pl.ds(pl.multiple_of(slot, count), count)]
        target = buffers.at[buffer, pl.ds(pl.multiple_of(place * count, count), count)]
        return pltpu.make_async_copy(source, target, arrived.at[buffer])

    def for_pages(i: Any, buffer: Any, verb: str) -> None:
        """Start the copies of block i, or wait for them. Pages that no lane sees are left out."""

        def page(j: Any, _: None) -> None:
            getattr(copy(pages_ref[session, j] * page_size, page_size, j - i * pages_a_block, buffer), verb)()

        most = jnp.minimum(lax.div(last + page_size - 1, page_size), (i + 1) * pages_a_block)
        lax.fori_loop(jnp.maximum(lax.div(first, page_size), i * pages_a_block), most, page, None)

    def for_scratch(verb: str) -> None:
        """The same for the scratch, whose buffer is the one that the trunk's first block leaves free."""

        def piece(j: Any, _: None) -> None:
            getattr(copy(scratch_ref[session, j], run, j, 1 - lax.rem(begin, 2)), verb)()

        lax.fori_loop(0, count // run, piece, None)

    def take(buffer: Any, mask: jax.Array, there: jax.Array) -> None:
        """Take a buffer's keys in. mask: [M, N], what lanes see; there: [N, 1], which of them any lane sees."""
        for head in range(kv_heads):
            if buffers.ndim == 3:
                key = value = buffers[buffer]
            elif sides_last:
                key, value = buffers[buffer, :, head, 0, :], buffers[buffer, :, head, 1, :]
            else:
                key, value = buffers[buffer, :, 0, head, :], buffers[buffer, :, 1, head, :]
            value = jnp.where(there, value, 0)
            _take(q_ref[0, head], key, value, mask, head)

    def _take(q: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, head: int) -> None:
        scores = lax.dot_general(q, key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(mask, scores, _NOTHING)
        before = maximum_ref[head][:, :1]
        maximum = jnp.maximum(before, scores.max(axis=1, keepdims=True))
        p = jnp.where(mask, jnp.exp(scores - maximum), 0.0)
        decay = jnp.exp(before - maximum)
        total = total_ref[head][:, :1] * decay + p.sum(axis=1, keepdims=True)
        seen = lax.dot_general(
            p.astype(value.dtype), value, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        output_ref[head] = output_ref[head] * decay + seen
        maximum_ref[head] = jnp.broadcast_to(maximum, maximum_ref.shape[1:])
        total_ref[head] = jnp.broadcast_to(total, total_ref.shape[1:])

    if sink_ref is None:
        maximum_ref[...] = jnp.full(maximum_ref.shape, _NOTHING, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    else:
        maximum_ref[...] = jnp.broadcast_to(sink_ref[...], maximum_ref.shape)
        total_ref[...] = jnp.ones(total_ref.shape, jnp.float32)
    output_ref[...] = jnp.zeros(output_ref.shape, jnp.float32)

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
    out_ref[0] = (output_ref[...] / jnp.maximum(total_ref[...][:, :, :1], 1e-30)).astype(out_ref.dtype)
