"""The operations between the products of a layer, fused, on CUDA: residual sum and norm, rotary embedding, gates.

Numbers are rounded where the modules of `transformers` round them, except in the rotary embedding, which stays in
float32 to its end. A row's bits depend on the row alone.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.target.kernels.cuda.cache import largest
from services.target.kernels.cuda.dependent_launch import launch_dependents, supports_dependent_launch, wait

_GATES = 1024  # gates that one program computes


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. weight: [width]; shift: added to the weight, 0 or 1."""

    weight: Tensor
    epsilon: float
    shift: float = 0.0


@triton.jit
def _scaled(x, scale, factor, SHIFTED: tl.constexpr):
    """x * scale * factor. x: float32. Returns float32, rounded to the format of `factor`."""
    if SHIFTED:
        return (x * scale * (1.0 + factor.to(tl.float32))).to(factor.dtype).to(tl.float32)
    return ((x * scale).to(factor.dtype).to(tl.float32) * factor.to(tl.float32)).to(factor.dtype).to(tl.float32)


@triton.jit
def _normed(x, factor, width, epsilon, SHIFTED: tl.constexpr):
    """The norm of x. x: float32, zeros beyond `width`. Returns as `_scaled`."""
    return _scaled(x, tl.rsqrt(tl.sum(x * x, 0) / width + epsilon), factor, SHIFTED)


@triton.jit
def _add_norm(
    residual, branch, after, weight, y, width, branch_row, epsilon, after_epsilon,
    BLOCK: tl.constexpr, ADDED: tl.constexpr, AFTER: tl.constexpr, SHIFTED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    launch_dependents(CHAINED)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    factor = tl.load(weight + at, mask=at < width, other=0.0)
    after_factor = factor
    if AFTER:
        after_factor = tl.load(after + at, mask=at < width, other=0.0)
    wait(CHAINED)
    x = tl.load(residual + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    if ADDED:
        more = tl.load(branch + row * branch_row + at, mask=at < width, other=0.0).to(tl.float32)
        if AFTER:
            more = _normed(more, after_factor, width, after_epsilon, SHIFTED)
        total = (x + more).to(residual.dtype.element_ty)
        tl.store(residual + row * width + at, total, mask=at < width)
        x = total.to(tl.float32)
    normed = _normed(x, factor, width, epsilon, SHIFTED)
    tl.store(y + row * width + at, normed.to(y.dtype.element_ty), mask=at < width)


def add_norm(residual: Tensor, branch: Tensor | None, norm: Norm, after: Norm | None = None) -> Tensor:
    """residual += branch, in place, then norm(residual). Both [T, width], residual contiguous; returns [T, width].

    after: norm of the branch before it is added
    """
    assert residual.is_contiguous(), "rows follow one another"
    rows, width = residual.shape
    y = torch.empty_like(residual)
    block, chain = triton.next_power_of_2(width), supports_dependent_launch(residual.device)
    added, own = (residual, norm) if branch is None else (branch, after or norm)  # placeholders, not read
    _add_norm[(rows,)](
        residual, added, own.weight, norm.weight, y, width, added.stride(0), norm.epsilon, own.epsilon,
        BLOCK=block, ADDED=branch is not None, AFTER=after is not None, SHIFTED=norm.shift != 0.0,
        CHAINED=chain, num_warps=min(max(block // 512, 1), 16), launch_pdl=chain,
    )  # fmt: skip
    return y


@triton.jit
def _rotate_and_store(
    wide, positions, slots, cosines, sines, query_weight, key_weight, k_pool, v_pool, wide_row, k_page, k_slot, v_page,
    v_slot, query_epsilon, key_epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    PAGE: tl.constexpr, NORMED: tl.constexpr, SHIFTED: tl.constexpr, LIMIT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    launch_dependents(CHAINED)
    wait(CHAINED)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = wide + row * wide_row + head * D
    at = tl.arange(0, HALF_PAD)
    half = at < HALF
    left = tl.load(first + at, mask=half, other=0.0).to(tl.float32)
    right = tl.load(first + HALF + at, mask=half, other=0.0).to(tl.float32)
    is_query = head < HEADS
    if NORMED:
        weight = query_weight if is_query else key_weight
        epsilon = query_epsilon if is_query else key_epsilon
        scale = tl.rsqrt((tl.sum(left * left, 0) + tl.sum(right * right, 0)) / D + epsilon)
        left = _scaled(left, scale, tl.load(weight + at, mask=half, other=0.0), SHIFTED)
        right = _scaled(right, scale, tl.load(weight + HALF + at, mask=half, other=0.0), SHIFTED)
    position = tl.load(positions + row)
    cosine = tl.load(cosines + position * HALF + at, mask=half, other=0.0)
    sine = tl.load(sines + position * HALF + at, mask=half, other=0.0)
    turned_left, turned_right = rotated(left, right, cosine, sine)
    if is_query:
        tl.store(first + at, turned_left.to(wide.dtype.element_ty), mask=half)
        tl.store(first + HALF + at, turned_right.to(wide.dtype.element_ty), mask=half)
    else:
        slot = tl.load(slots + row)
        if slot >= PAGE:  # smaller slots belong to NULL_PAGE
            own = head - HEADS
            key = at_slot(k_pool, slot, k_page, k_slot, PAGE) + own * D
            put(key, at, half, turned_left.to(wide.dtype.element_ty), LIMIT)
            put(key + HALF, at, half, turned_right.to(wide.dtype.element_ty), LIMIT)
            source = first + KV_HEADS * D
            value = at_slot(v_pool, slot, v_page, v_slot, PAGE) + own * D
            put(value, at, half, tl.load(source + at, mask=half, other=0.0), LIMIT)
            put(value + HALF, at, half, tl.load(source + HALF + at, mask=half, other=0.0), LIMIT)


@triton.jit
def rotated(left, right, cosine, sine):
    """The rotated halves of heads, in float32.

    Written with explicit fused multiply-adds, so that every kernel that inlines it gives the same bits.
    """
    return tl.fma(left, cosine, -right * sine), tl.fma(right, cosine, left * sine)


@triton.jit
def at_slot(pool, slot, page, row, PAGE: tl.constexpr):
    """The address of a slot in a pool. page, row: strides."""
    return pool + (slot // PAGE) * page + (slot % PAGE) * row


@triton.jit
def put(target, at, there, numbers, LIMIT: tl.constexpr):
    """Store numbers in a pool. LIMIT: largest number of the pool's format, to which larger ones are clamped, or 0."""
    if LIMIT > 0:
        numbers = tl.minimum(tl.maximum(numbers.to(tl.float32), -LIMIT), LIMIT)
    tl.store(target + at, numbers.to(target.dtype.element_ty), mask=there)


@triton.jit
def store_halves(
    left, right, head, row, at, there, slot, queries, k_pool, v_pool, q_row, k_page, k_slot, v_page, v_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Store halves of a head, [rows, pairs] each: of a query in `queries`, of a key or value in its pool.

    row, there: [rows]; at: [1, pairs]; slot: [rows, 1]
    """
    if head < HEADS:
        target = queries + row[:, None] * q_row + head * D + at
        tl.store(target, left, mask=there[:, None])
        tl.store(target + HALF, right, mask=there[:, None])
    else:
        stored = (slot >= PAGE) & (at < HALF)  # smaller slots belong to NULL_PAGE
        if head < HEADS + KV_HEADS:
            key = at_slot(k_pool, slot, k_page, k_slot, PAGE) + (head - HEADS) * D
            put(key, at, stored, left, LIMIT)
            put(key, HALF + at, stored, right, LIMIT)
        else:
            value = at_slot(v_pool, slot, v_page, v_slot, PAGE) + (head - HEADS - KV_HEADS) * D
            put(value, at, stored, left, LIMIT)
            put(value, HALF + at, stored, right, LIMIT)


def rotate_and_store(
    wide: Tensor,
    heads: tuple[int, int],
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None = None,
) -> Tensor:
    """Apply the rotary embedding to queries and keys; store keys and values in the cache.

    wide: [T, (heads + 2 kv_heads) * D], queries, keys and values; heads: numbers of query heads and key heads; slots:
    [T] int64, slots of NULL_PAGE are not stored; tables: cosines and sines, [positions, D / 2] float32; pools: keys and
    values, [pages, page_size, kv_heads, D], of any format; norms: of queries and keys. Returns the queries,
    [T, heads, D], a view of `wide`.
    """
    count, kv_count = heads
    dim = wide.shape[1] // (count + 2 * kv_count)
    k_pool, v_pool = pools
    assert wide.stride(1) == 1, "a row's numbers lie together"
    assert k_pool.is_contiguous(), "a slot's heads lie together"
    assert v_pool.is_contiguous(), "a slot's heads lie together"
    chain = supports_dependent_launch(wide.device)
    query, key = norms or (Norm(wide, 0.0), Norm(wide, 0.0))  # placeholders, not read
    _rotate_and_store[(wide.shape[0], count + kv_count)](
        wide, positions, slots, *tables, query.weight, key.weight, k_pool, v_pool,
        wide.stride(0), *k_pool.stride()[:2], *v_pool.stride()[:2], query.epsilon, key.epsilon,
        HEADS=count, KV_HEADS=kv_count, D=dim, HALF=dim // 2, HALF_PAD=triton.next_power_of_2(dim // 2),
        PAGE=k_pool.shape[1], NORMED=norms is not None, SHIFTED=query.shift != 0.0,
        LIMIT=largest(k_pool), CHAINED=chain, num_warps=1, launch_pdl=chain,
    )  # fmt: skip
    queries: Tensor = wide[:, : count * dim].unflatten(1, (count, dim))
    return queries


@triton.jit
def activated(gate, GELU: tl.constexpr):
    """SiLU, or GELU with the tanh approximation, in float32."""
    if GELU:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))  # 0.5 (1 + tanh(x)) = 1 - 1 / (exp(2 x) + 1)
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated(wide, y, width, wide_row, GELU: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    launch_dependents(CHAINED)
    wait(CHAINED)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(wide + row * wide_row + at, mask=at < width, other=0.0).to(tl.float32)
    value = tl.load(wide + row * wide_row + width + at, mask=at < width, other=0.0).to(tl.float32)
    opened = activated(gate, GELU).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * width + at, (opened * value).to(y.dtype.element_ty), mask=at < width)


def gated(wide: Tensor, *, gelu: bool = False) -> Tensor:
    """activation(gates) * values. wide: [T, 2 * width], gates, then values. Returns [T, width]."""
    rows, width = wide.shape[0], wide.shape[1] // 2
    y = wide.new_empty(rows, width)
    chain = supports_dependent_launch(wide.device)
    _gated[(rows, -(-width // _GATES))](
        wide, y, width, wide.stride(0), GELU=gelu, BLOCK=_GATES, CHAINED=chain, num_warps=4, launch_pdl=chain
    )
    return y
