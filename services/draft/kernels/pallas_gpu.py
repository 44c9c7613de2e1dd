"""Ragged paged attention in Pallas for GPUs, compiled by Triton; keys and values are read in place.

A program processes one key head and M of a session's lanes, which are its rows times the query heads of that key head,
and walks over the session's own blocks of N keys: the page table gives their slots, so that pages may have any size.
Keys that no lane sees are not read. Long contexts of few sessions are split among programs by the session's own length,
and merged afterwards.

    lanes       row 0: head 0 .. G-1 | row 1: head 0 .. G-1 | ...      M a program
    keys        since ... visible, in blocks of N, `splits` shares of them | scratch: with the first share

Heads are cut into parts whose widths are powers of two, as Triton's blocks must be: 128 is one, 576 is 512 + 64.
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
_MAX_SPLITS = 32
# Keys that are worth a share of their own.
_MIN_SHARE = 256
_MIN_WIDTH = 16  # of an operand of a product


class Tile(NamedTuple):
    """Block sizes of a program: lanes and keys a block, warps, pipeline stages."""

    lanes: int
    keys: int
    warps: int
    stages: int


class Running(NamedTuple):
    """Online softmax over the keys so far, in powers of two: [M], [M], and the parts of the output [M, width]."""

    maximum: jax.Array
    total: jax.Array
    output: tuple[jax.Array, ...]


def pick_tile(lanes: int, dim: int, itemsize: int) -> Tile:
    """The tile for a shape: as large as the registers hold without spilling, on GPUs since Ampere.

    lanes: of a session and key head; dim: head size; itemsize: bytes of an element of a key
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
        width = max(1 << (dim - start).bit_length() - 1, _MIN_WIDTH)
        found.append((start, width))
        start += width
    return found


def splits_for(programs: int, tokens: int) -> int:
    """Shares of a context. programs: those without splits; tokens: of the longest context."""
    wanted = min(_PROGRAMS // programs, tokens // _MIN_SHARE, _MAX_SPLITS)
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
    """As of model.layers.backend.attention. tile, splits: override the chosen ones."""
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
    # Masks are passed as bytes, because memory is not addressed by bits.
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
    """Merge the shares of contexts, each normalized by its own total. Shares without keys have undefined output."""
    weight = jnp.exp2(maximum - maximum.max(axis=0)) * total  # [splits, S, Q, heads]
    share = weight / jnp.maximum(weight.sum(axis=0), 1e-30)
    return jnp.where(share[..., None] > 0, output * share[..., None], 0.0).sum(axis=0)


class _Program(NamedTuple):
    """Indices of a program: session, key head and share, and its lanes, [M] each. live: lanes that exist."""

    session: jax.Array
    head: jax.Array
    split: jax.Array
    live: jax.Array
    row: jax.Array
    q_head: jax.Array


class _PrefixRange(NamedTuple):
    """The blocks of the prefix KV that a program reads: begin .. end. visible, since: of the lanes, [M]."""

    visible: jax.Array
    since: jax.Array | None
    begin: jax.Array
    end: jax.Array


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
    """One program. refs: the optional inputs of `names`, then the output, and with shares their maxima and totals."""
    optional = dict(zip(names, refs, strict=False))
    out_ref, *softmax_refs = refs[len(names) :]
    program = _place(q_ref.shape, pool_ref.shape[2], tile.lanes, blocks)
    session, _, split, live, row, q_head = program
    queries = [
        _load_part(q_ref, (session, row[:, None], q_head[:, None]), live, part) for part in parts(q_ref.shape[-1])
    ]
    take = partial(_take, queries, pool_ref, program.head, softcap)
    prefix = _prefix_range(program, visible_ref, optional.get("since"), tile, splits)
    count = slots_ref.shape[1]

    def block(i: jax.Array, running: Running) -> Running:
        position = i * tile.keys + jnp.arange(tile.keys)
        there = position < prefix.visible.max()
        mask = position[None] < prefix.visible[:, None]
        if prefix.since is not None:
            there &= position >= prefix.since.min()
            mask &= position[None] >= prefix.since[:, None]
        page = plgpu.load(pages_ref.at[session, lax.div(position, page_size)], mask=there, other=0)
        return take(running, page * page_size + lax.rem(position, page_size), mask, there)

    def scratch(i: jax.Array, running: Running) -> Running:
        place = i * tile.keys + jnp.arange(tile.keys)
        known = place < count
        index = (session, row[:, None], place[None])
        mask = plgpu.load(mask_ref.at[index], mask=live[:, None] & known[None], other=0) != 0
        there = mask.astype(jnp.int32).max(axis=0) > 0
        slot = plgpu.load(slots_ref.at[session, place], mask=known, other=0)
        return take(running, slot, mask, there)

    running = lax.fori_loop(prefix.begin, prefix.end, block, _nothing(tile.lanes, q_ref.shape[-1]))
    scratch_blocks = lax.select(split == 0, jnp.int32(pl.cdiv(count, tile.keys)), jnp.int32(0))
    running = lax.fori_loop(jnp.int32(0), scratch_blocks, scratch, running)
    if "sinks" in optional:
        running = _with_sink(running, plgpu.load(optional["sinks"].at[q_head], mask=live, other=0.0), split)
    _store(running, program, out_ref, softmax_refs)


def _place(q_shape: tuple[int, ...], kv_heads: int, lanes: int, blocks: int) -> _Program:
    """lanes: of a program; blocks: programs of a session and key head."""
    _, rows, heads, _ = q_shape
    group = heads // kv_heads
    head, place, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    session = lax.div(place, blocks)
    lane = lax.rem(place, blocks) * lanes + jnp.arange(lanes)  # [M]
    live = lane < rows * group
    return _Program(session, head, split, live, lax.div(lane, group), head * group + lax.rem(lane, group))


def _columns(dim: int, part: tuple[int, int]) -> tuple[jax.Array, Any]:
    """The columns [1, width] of a part, and a mask of those inside of the head; None if all are."""
    start, width = part
    column = (start + jnp.arange(width))[None]
    return column, None if start + width <= dim else column < dim


def _load_part(ref: Any, index: tuple[Any, ...], there: jax.Array, part: tuple[int, int]) -> jax.Array:
    """A part of the heads at an index, [N, width]; zeros outside of the mask."""
    column, inside = _columns(ref.shape[-1], part)
    mask = there[:, None] if inside is None else there[:, None] & inside
    mask = jnp.broadcast_to(mask, (there.shape[0], part[1]))
    return plgpu.load(ref.at[(*index, column)], mask=mask, other=0.0)


def _prefix_range(program: _Program, visible_ref: Any, since_ref: Any, tile: Tile, splits: int) -> _PrefixRange:
    visible = plgpu.load(visible_ref.at[program.session, program.row], mask=program.live, other=0)
    first = jnp.int32(0)
    since = None
    if since_ref is not None:
        since = plgpu.load(since_ref.at[program.session, program.row], mask=program.live, other=2**30)
        first = lax.div(jnp.minimum(since.min(), visible.max()), tile.keys)
    last = lax.div(visible.max() + tile.keys - 1, tile.keys)
    share = lax.div(last - first + splits - 1, splits)
    begin = first + program.split * share
    return _PrefixRange(visible, since, begin, jnp.minimum(begin + share, last))


def _nothing(lanes: int, dim: int) -> Running:
    """The state before any key."""
    return Running(
        jnp.full(lanes, _NOTHING, jnp.float32),
        jnp.zeros(lanes, jnp.float32),
        tuple(jnp.zeros((lanes, width), jnp.float32) for _, width in parts(dim)),
    )


def _take(
    queries: list[jax.Array],
    pool_ref: Any,
    head: jax.Array,
    softcap: float | None,
    running: Running,
    slot: jax.Array,
    mask: jax.Array,
    there: jax.Array,
) -> Running:
    """Accumulate a block of keys. queries: [M, width] of each part; slot: [N]; mask: [M, N], keys that lanes see;
    there: [N], keys that are read.
    """
    dim = pool_ref.shape[-1]
    widths, compute = parts(dim), jnp.promote_types(queries[0].dtype, pool_ref.dtype)
    keys = [_load_part(pool_ref, (slot[:, None], 0, head), there, part).astype(compute) for part in widths]
    scores = sum(_product(part.astype(compute), key, 1) for part, key in zip(queries, keys, strict=True))
    scores = scores * (dim**-0.5 * (1.0 if softcap else _LOG2E))
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
            values = _load_part(pool_ref, (slot[:, None], 1, head), there, part).astype(compute)
        output.append(running.output[i] * decay[:, None] + _product(p, values, 0))
    return Running(maximum, total, tuple(output))


def _product(left: jax.Array, right: jax.Array, contracted: int) -> jax.Array:
    """left @ right, or @ its transpose where dimension 1 is contracted; summed in float32, exact for float32."""
    exact = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return lax.dot_general(
        left, right, (((1,), (contracted,)), ((), ())), precision=exact, preferred_element_type=jnp.float32
    )


def _with_sink(running: Running, sink: jax.Array, split: jax.Array) -> Running:
    """Accumulate a key without a value, in the first share. sink: [M], its scores."""
    sink = sink.astype(jnp.float32) * _LOG2E
    sink = jnp.where(split == 0, sink, _NOTHING)
    maximum = jnp.maximum(running.maximum, sink)
    decay = jnp.exp2(running.maximum - maximum)
    extra = jnp.where(split == 0, jnp.exp2(sink - maximum), 0.0)
    return Running(maximum, running.total * decay + extra, tuple(part * decay[:, None] for part in running.output))


def _store(running: Running, program: _Program, out_ref: Any, softmax_refs: list[Any]) -> None:
    """Write the outputs of the lanes, normalized by their totals."""
    session, _, split, live, row, q_head = program
    maximum, total, output = running
    for ref, value in zip(softmax_refs, (maximum, total), strict=False):
        plgpu.store(ref.at[split, session, row, q_head], value, mask=live)
    seen = live & (total > 0) if softmax_refs else live
    dim = out_ref.shape[-1]
    for part, numbers in zip(parts(dim), output, strict=True):
        column, inside = _columns(dim, part)
        there = seen[:, None] if inside is None else seen[:, None] & inside
        value = (numbers / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)
        at = out_ref.at[split, session, row[:, None], q_head[:, None], column]
        plgpu.store(at, value, mask=jnp.broadcast_to(there, value.shape))
