"""Ragged paged attention in Pallas for GPUs: Triton compiles it, keys and values are read where they lie.

A program takes one key head and M of a session's lanes, which are its rows times the query heads of that key head, and
walks over the session's own blocks of N keys: a row of page ids gives their slots, so that pages may have any size, and
what no lane sees is not read. Long contexts of few sessions are split among programs by the session's own length, and
folded afterwards.

    lanes       row 0: head 0 .. G-1 | row 1: head 0 .. G-1 | ...      M a program
    keys        since ... visible, in blocks of N, `splits` shares of them | scratch: with the first share

Head sizes are cut into parts whose widths are powers of two, as Triton's blocks must be: 128 is one, 576 is 512 + 64.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from services.draft.kernels.base import Context

_LOG2E = math.log2(math.e)
_NOTHING = -1e30
# Programs that keep a large GPU busy; contexts are split until there are as many.
_PROGRAMS = 264
_MOST_SPLITS = 32
# Keys that are worth a share of their own.
_LEAST_SHARE = 256
_LEAST_WIDTH = 16  # of an operand of a product


class Tile(NamedTuple):
    """How a program cuts its work: lanes and keys a block, warps, blocks in flight."""

    lanes: int
    keys: int
    warps: int
    stages: int


class Running(NamedTuple):
    """Online softmax over the keys so far, in powers of two: [M], [M], and a part of the output [M, width] each."""

    maximum: jax.Array
    total: jax.Array
    output: tuple[jax.Array, ...]


def pick_tile(lanes: int, dim: int, itemsize: int) -> Tile:
    """The tile of a shape: as large as registers hold without spilling, on GPUs since Ampere.

    lanes: of a session and key head; dim: head size; itemsize: of a key's number, in bytes
    """
    wanted = max(16, pl.next_power_of_2(lanes))
    if itemsize > 2:  # exact products run outside the tensor cores
        return Tile(min(wanted, 16), 32 if dim <= 128 else 16, 4, 2)
    if dim <= 128:
        return Tile(wanted, 64, 4, 5) if wanted <= 32 else Tile(64, 64, 8, 3)
    if dim <= 256:
        return Tile(min(wanted, 64), 32, 8 if wanted > 32 else 4, 2)
    return Tile(min(wanted, 32), 32, 8, 2)


def parts(dim: int) -> list[tuple[int, int]]:
    """Cut a head into (start, width) with widths that are powers of two; the last may reach beyond its end."""
    found: list[tuple[int, int]] = []
    start = 0
    while start < dim:
        width = max(1 << (dim - start).bit_length() - 1, _LEAST_WIDTH)
        found.append((start, width))
        start += width
    return found


def splits_for(programs: int, tokens: int) -> int:
    """Shares of a context. programs: those of unsplit contexts; tokens: of the longest context."""
    wanted = min(_PROGRAMS // programs, tokens // _LEAST_SHARE, _MOST_SPLITS)
    return max(wanted, 1)


def gpu_attention(
    q: jax.Array,
    pool: jax.Array,
    context: Context,
    page_size: int,
    *,
    since: jax.Array | None = None,
    sinks: jax.Array | None = None,
    softcap: float | None = None,
    interpret: bool = False,
    tile: Tile | None = None,
    splits: int | None = None,
) -> jax.Array:
    """As of kernels.attention. tile, splits: other than those that are picked."""
    sessions, rows, heads, dim = q.shape
    kv_heads = pool.shape[2]
    lanes = rows * (heads // kv_heads)
    tile = tile or pick_tile(lanes, dim, pool.dtype.itemsize)
    blocks = pl.cdiv(lanes, tile.lanes)
    splits = splits or splits_for(sessions * blocks * kv_heads, context.pages.shape[1] * page_size)
    whole = splits == 1
    shape = (splits, sessions, rows, heads)
    shapes = [jax.ShapeDtypeStruct((*shape, dim), q.dtype if whole else jnp.float32)]
    if not whole:
        shapes += [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    optional = {"since": since, "sinks": sinks}
    given = {name: array for name, array in optional.items() if array is not None}
    kernel = partial(
        _kernel, names=tuple(given), tile=tile, splits=splits, page_size=page_size, blocks=blocks, softcap=softcap
    )
    # Masks travel as bytes: memory has no bits.
    mask = context.scratch_mask.astype(jnp.int8)
    outputs = pl.pallas_call(
        kernel,
        grid=(kv_heads, sessions * blocks, splits),
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="ragged_paged_attention",
    )(q, pool, context.pages, context.visible, context.scratch_slots, mask, *given.values())
    return outputs[0][0] if whole else _fold(*outputs).astype(q.dtype)


def _fold(output: jax.Array, maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Join the shares of contexts, each normed by its own total. Shares without keys have written no output."""
    weight = jnp.exp2(maximum - maximum.max(axis=0)) * total  # [splits, S, Q, heads]
    share = weight / jnp.maximum(weight.sum(axis=0), 1e-30)
    return jnp.where(share[..., None] > 0, output * share[..., None], 0.0).sum(axis=0)


def _kernel(
    q_ref: Any,
    pool_ref: Any,
    pages_ref: Any,
    visible_ref: Any,
    slots_ref: Any,
    mask_ref: Any,
    *refs: Any,
    names: tuple[str, ...],
    tile: Tile,
    splits: int,
    page_size: int,
    blocks: int,
    softcap: float | None,
) -> None:
    """One program. refs: the optional inputs of `names`, then the output, and for shares their maxima and totals."""
    optional = dict(zip(names, refs, strict=False))
    out_ref, *softmax_refs = refs[len(names) :]
    _, rows, heads, dim = q_ref.shape
    kv_heads, count = pool_ref.shape[2], slots_ref.shape[1]
    group = heads // kv_heads
    head, place, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    session = lax.div(place, blocks)
    lane = lax.rem(place, blocks) * tile.lanes + jnp.arange(tile.lanes)  # [M]
    live = lane < rows * group
    row, q_head = lax.div(lane, group), head * group + lax.rem(lane, group)
    widths = parts(dim)

    def columns(start: int, width: int) -> tuple[jax.Array, Any]:
        """The columns [1, width] of a part, and which of them are there; None for all."""
        column = (start + jnp.arange(width))[None]
        return column, None if start + width <= dim else column < dim

    def load_part(ref: Any, index: tuple[Any, ...], there: jax.Array, part: tuple[int, int]) -> jax.Array:
        column, inside = columns(*part)
        mask = there[:, None] if inside is None else there[:, None] & inside
        mask = jnp.broadcast_to(mask, (there.shape[0], part[1]))
        return plgpu.load(ref.at[(*index, column)], mask=mask, other=0.0)

    queries = [load_part(q_ref, (session, row[:, None], q_head[:, None]), live, part) for part in widths]
    compute = jnp.promote_types(q_ref.dtype, pool_ref.dtype)
    scale = dim**-0.5 * (1.0 if softcap else _LOG2E)

    def take(running: Running, slot: jax.Array, mask: jax.Array, there: jax.Array) -> Running:
        """Take keys in. slot, there: [N], there: which are read; mask: [M, N], what lanes see."""
        keys = [load_part(pool_ref, (slot[:, None], 0, head), there, part).astype(compute) for part in widths]
        scores = sum(
            lax.dot_general(part.astype(compute), key, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            for part, key in zip(queries, keys, strict=True)
        )
        scores = scores * scale
        if softcap:
            scores = jnp.tanh(scores / softcap) * (softcap * _LOG2E)
        scores = jnp.where(mask, scores, _NOTHING)
        maximum = jnp.maximum(running.maximum, scores.max(axis=1))
        p = jnp.where(mask, jnp.exp2(scores - maximum[:, None]), 0.0)
        decay = jnp.exp2(running.maximum - maximum)
        total = running.total * decay + p.sum(axis=1)
        p = p.astype(compute)
        output = []
        for i, part in enumerate(widths):
            values = keys[i]
            if pool_ref.shape[1] > 1:
                values = load_part(pool_ref, (slot[:, None], 1, head), there, part).astype(compute)
            seen = lax.dot_general(p, values, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            output.append(running.output[i] * decay[:, None] + seen)
        return Running(maximum, total, tuple(output))

    visible = plgpu.load(visible_ref.at[session, row], mask=live, other=0)
    first = jnp.int32(0)
    since = None
    if "since" in optional:
        since = plgpu.load(optional["since"].at[session, row], mask=live, other=2**30)
        first = lax.div(jnp.minimum(since.min(), visible.max()), tile.keys)
    last = lax.div(visible.max() + tile.keys - 1, tile.keys)
    share = lax.div(last - first + splits - 1, splits)
    begin = first + split * share
    end = jnp.minimum(begin + share, last)

    running = Running(
        jnp.full(tile.lanes, _NOTHING, jnp.float32),
        jnp.zeros(tile.lanes, jnp.float32),
        tuple(jnp.zeros((tile.lanes, width), jnp.float32) for _, width in widths),
    )

    def block(i: jax.Array, running: Running) -> Running:
        position = i * tile.keys + jnp.arange(tile.keys)
        there = position < visible.max()
        mask = position[None] < visible[:, None]
        if since is not None:
            there &= position >= since.min()
            mask &= position[None] >= since[:, None]
        page = plgpu.load(pages_ref.at[session, lax.div(position, page_size)], mask=there, other=0)
        return take(running, page * page_size + lax.rem(position, page_size), mask, there)

    running = lax.fori_loop(begin, end, block, running)

    def scratch(i: jax.Array, running: Running) -> Running:
        place = i * tile.keys + jnp.arange(tile.keys)
        known = place < count
        index = (session, row[:, None], place[None])
        mask = plgpu.load(mask_ref.at[index], mask=live[:, None] & known[None], other=0) != 0
        there = mask.astype(jnp.int32).max(axis=0) > 0
        slot = plgpu.load(slots_ref.at[session, place], mask=known, other=0)
        return take(running, slot, mask, there)

    scratch_blocks = lax.select(split == 0, jnp.int32(pl.cdiv(count, tile.keys)), jnp.int32(0))
    running = lax.fori_loop(jnp.int32(0), scratch_blocks, scratch, running)
    _store(running, optional, out_ref, softmax_refs, (split, session, row, q_head), live, columns, widths)


def _store(
    running: Running,
    optional: dict[str, Any],
    out_ref: Any,
    softmax_refs: list[Any],
    index: tuple[Any, ...],
    live: jax.Array,
    columns: Any,
    widths: list[tuple[int, int]],
) -> None:
    """Write what the lanes saw, normed by their totals. index: [split, session, row, head]."""
    split, session, row, q_head = index
    maximum, total, output = running
    if "sinks" in optional:
        # One more key without a value, which the first share sees.
        sink = plgpu.load(optional["sinks"].at[q_head], mask=live, other=0.0).astype(jnp.float32) * _LOG2E
        sink = jnp.where(split == 0, sink, _NOTHING)
        higher = jnp.maximum(maximum, sink)
        decay = jnp.exp2(maximum - higher)
        extra = jnp.where(split == 0, jnp.exp2(sink - higher), 0.0)
        maximum, total = higher, total * decay + extra
        output = tuple(part * decay[:, None] for part in output)
    for ref, value in zip(softmax_refs, (maximum, total), strict=False):
        plgpu.store(ref.at[split, session, row, q_head], value, mask=live)
    seen = live & (total > 0) if softmax_refs else live
    for (start, width), part in zip(widths, output, strict=True):
        column, inside = columns(start, width)
        there = seen[:, None] if inside is None else seen[:, None] & inside
        value = (part / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)
        at = out_ref.at[split, session, row[:, None], q_head[:, None], column]
        plgpu.store(at, value, mask=jnp.broadcast_to(there, value.shape))
