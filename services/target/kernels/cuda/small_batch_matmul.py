"""Matrix products of up to 16 rows on CUDA, bound by the time to read the matrix.

PyTorch's libraries split a sum over programs, add the parts in another launch, and choose both by the number of rows.
Here a program reads whole rows of the matrix, once for all rows of the step, some blocks ahead; a row has the same bits
whether 1 or 16 rows are computed together. Two products are fused with the operation after them:

    gated          activation(gates) * values: a program multiplies with the rows of gates and of their values
    linear_rotary  rotary embedding and the write to the KV cache: a program multiplies with both halves of a head

After a small launch, which leaves multiprocessors idle, programs start before that launch ends and read data that do
not depend on it (dependent_launch.py). On GPUs of compute capability 9 and 10, small_batch_matmul_gluon.py has faster
kernels for multiples of 256 inputs.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.target.kernels.cuda import small_batch_matmul_gluon as gluon
from services.target.kernels.cuda.attention import interpreted, processors
from services.target.kernels.cuda.cache import largest
from services.target.kernels.cuda.dependent_launch import launch_dependents, supports_dependent_launch, wait
from services.target.kernels.cuda.fused_elementwise import activated, rotated, store_halves

ROWS = 16
"""Most rows of a product."""
_INPUTS = 256  # inputs of each output that a program reads at a time
_FORMATS = (torch.bfloat16, torch.float16)
_LEAST_OUTPUTS = 2048  # with 16 outputs a program, enough programs for a GPU
_PAIRS = 16  # rotated pairs of a head that a program computes


@triton.jit
def _part(first, at, inputs, EVEN: tl.constexpr):
    """Columns `at` of the matrix's rows that start at `first`. at: [K]. Returns [K, OUTPUTS]."""
    if EVEN:
        return tl.load(first[None, :] + at[:, None])
    return tl.load(first[None, :] + at[:, None], mask=(at < inputs)[:, None], other=0.0)


@triton.jit
def _inputs(x, live, at, inputs, EVEN: tl.constexpr):
    """Columns `at` of the rows x, [ROWS, 1]. at: [K]. Returns [ROWS, K]."""
    if EVEN:
        return tl.load(x + at[None, :], mask=live, other=0.0)
    return tl.load(x + at[None, :], mask=live & (at < inputs)[None, :], other=0.0)


@triton.jit
def _add(left, right, total, WIDE: tl.constexpr):
    """total + left right."""
    if WIDE:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    return tl.dot(left, right, total)


@triton.jit
def _multiply(
    x, own, beside, rows, inputs, x_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr, TWO: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Products of rows with the matrix's rows that start at `own`, [OUTPUTS], and, with TWO, at `beside`.

    Returns two tensors [ROWS, OUTPUTS] float32; the second is zero without TWO.
    """
    row, part = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    live, x_rows = (row < rows)[:, None], x + row[:, None] * x_row
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    second = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in tl.range(0, inputs, INPUTS):
        right = _part(own, begin + part, inputs, EVEN)
        left = _inputs(x_rows, live, begin + part, inputs, EVEN)
        total = _add(left, right, total, WIDE)
        if TWO:
            second = _add(left, _part(beside, begin + part, inputs, EVEN), second, WIDE)
    return total, second


@triton.jit(do_not_specialize=["rows"])
def small_batch_linear(
    x, weight, bias, y, rows, outputs, inputs, x_row, w_row, y_row,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, GATED: tl.constexpr, GELU: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """GATED: the weight holds gates and, `outputs` rows further, their values."""
    launch_dependents(CHAINED)
    row, output = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    own = weight + tl.minimum(output, outputs - 1).to(tl.int64) * w_row
    beside = own + outputs.to(tl.int64) * w_row
    wait(CHAINED)
    total, values = _multiply(x, own, beside, rows, inputs, x_row, ROWS, OUTPUTS, INPUTS, EVEN, GATED, WIDE)
    rounded = y.dtype.element_ty
    if GATED:
        opened = activated(total.to(rounded).to(tl.float32), GELU).to(rounded).to(tl.float32)
        total = opened * values.to(rounded).to(tl.float32)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    there = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(y + row[:, None] * y_row + output[None, :], total.to(rounded), mask=there)


@triton.jit(do_not_specialize=["rows"])
def small_batch_rotary(
    x, weight, bias, positions, slots, cosines, sines, queries, k_pool, v_pool, rows, inputs, x_row, w_row, q_row,
    k_page, k_slot, v_page, v_slot,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
    LIMIT: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, INPUTS: tl.constexpr, EVEN: tl.constexpr,
    BIAS: tl.constexpr, WIDE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The weight holds queries, keys and values, head after head. LIMIT: largest number that the pools hold, or 0."""
    launch_dependents(CHAINED)
    head = tl.program_id(0) // (HALF // PAIRS)
    first = tl.program_id(0) % (HALF // PAIRS) * PAIRS  # first pair; its other number is HALF further
    place = tl.arange(0, 2 * PAIRS)
    output = head * D + first + place % PAIRS + place // PAIRS * HALF
    own = weight + output.to(tl.int64) * w_row
    row, at = tl.arange(0, ROWS), first + tl.arange(0, PAIRS)[None, :]
    there = row < rows
    angle = tl.load(positions + row, mask=there, other=0)[:, None] * HALF + at
    cosine, sine = tl.load(cosines + angle), tl.load(sines + angle)
    slot = tl.load(slots + row, mask=there, other=0)[:, None]
    wait(CHAINED)
    total, _ = _multiply(x, own, own, rows, inputs, x_row, ROWS, 2 * PAIRS, INPUTS, EVEN, False, WIDE)
    rounded = queries.dtype.element_ty
    if BIAS:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    left, right = tl.split(total.to(rounded).to(tl.float32).reshape(ROWS, 2, PAIRS).permute(0, 2, 1))
    if head < HEADS + KV_HEADS:
        left, right = rotated(left, right, cosine, sine)
    store_halves(
        left.to(rounded), right.to(rounded), head, row, at, there, slot, queries, k_pool, v_pool, q_row, k_page, k_slot,
        v_page, v_slot, HEADS, KV_HEADS, D, HALF, PAGE, LIMIT,
    )  # fmt: skip


def serves(x: Tensor, weight: Tensor) -> bool:
    """True if these kernels measured faster than PyTorch's. x: [T, inputs]; weight: [outputs, inputs]."""
    return 0 < len(x) <= ROWS and x.dtype in _FORMATS and weight.shape[0] >= _LEAST_OUTPUTS


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, early: bool = False) -> Tensor:
    """x W^T + bias. x: [T, inputs], at most ROWS rows; weight: [outputs, inputs]; bias: [outputs]. [T, outputs].

    early: the previous launch is small, such as a norm, so programs may start while it runs. After a large product,
    early programs would crowd onto the multiprocessors that finish it first.
    """
    return _launch(x, weight, bias, weight.shape[0], early, gated=False, gelu=False)


def gated(x: Tensor, weight: Tensor, *, gelu: bool = False, early: bool = False) -> Tensor:
    """activation(x G^T) * (x V^T). x, early: as in `linear`; weight: [2 * width, inputs], G above V. [T, width]."""
    return _launch(x, weight, None, weight.shape[0] // 2, early, gated=True, gelu=gelu)


def serves_rotary(heads: tuple[int, int], weight: Tensor) -> bool:
    """True if `linear_rotary` supports the shape. heads: numbers of query heads and key heads."""
    return weight.shape[0] // (heads[0] + 2 * heads[1]) % (2 * _PAIRS) == 0


def linear_rotary(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    heads: tuple[int, int],
    positions: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    pools: tuple[Tensor, Tensor],
    *,
    early: bool = False,
) -> Tensor:
    """`fused_elementwise.rotate_and_store` of x W^T + bias. Returns the queries, [T, heads, D].

    x, bias, early: as in `linear`. weight: [(heads + 2 kv_heads) * D, inputs], of queries, keys and values; requires
    `serves_rotary`.
    """
    rows, inputs = _shape(x, weight)
    dim = weight.shape[0] // (heads[0] + 2 * heads[1])
    k_pool, v_pool = pools
    assert k_pool.is_contiguous(), "a slot's heads lie together"
    assert v_pool.is_contiguous(), "a slot's heads lie together"
    queries = x.new_empty(rows, heads[0], dim)
    args = (
        x, weight, x if bias is None else bias, positions, slots, *tables, queries, k_pool, v_pool,
        rows, inputs, x.stride(0), weight.stride(0), queries.stride(0), *k_pool.stride()[:2], *v_pool.stride()[:2],
    )  # fmt: skip
    constants = {
        "HEADS": heads[0], "KV_HEADS": heads[1], "D": dim, "HALF": dim // 2, "PAGE": k_pool.shape[1],
        "LIMIT": largest(k_pool), "ROWS": ROWS, "PAIRS": _PAIRS, "BIAS": bias is not None,
    }  # fmt: skip
    programs = (weight.shape[0] // (2 * _PAIRS),)
    if gluon.serves(x, weight):
        gluon.small_batch_rotary[programs](*args, **constants, **gluon.TURNED.constants, launch_pdl=early)
    else:
        small_batch_rotary[programs](*args, **constants, **_constants(x, early), num_stages=4)
    return queries


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, outputs: int, early: bool, *, gated: bool, gelu: bool
) -> Tensor:
    rows, inputs = _shape(x, weight)
    y = x.new_empty(rows, outputs)
    own = 32 if weight.shape[0] >= 2 * _LEAST_OUTPUTS else 16
    programs = (triton.cdiv(outputs, own),)
    args = (
        x, weight, x if bias is None else bias, y, rows, outputs, inputs, x.stride(0), weight.stride(0), y.stride(0),
    )  # fmt: skip
    constants = {"ROWS": ROWS, "BIAS": bias is not None, "GATED": gated, "GELU": gelu}
    if gluon.serves(x, weight):
        alone = not gated and programs[0] <= processors(x.device)
        ring = gluon.GATED if gated else gluon.ALONE if alone else gluon.MANY
        gluon.small_batch_linear[programs](
            *args, **constants, **ring.constants, OUTPUTS=2 * own if gated else own, launch_pdl=early or alone
        )
    else:
        small_batch_linear[programs](
            *args, **constants, **_constants(x, early), OUTPUTS=own, num_stages=3 if gated else 4
        )
    return y


def _constants(x: Tensor, early: bool) -> dict[str, Any]:
    """Constants and options common to the Triton kernels."""
    chain = supports_dependent_launch(x.device)
    return {
        "INPUTS": _INPUTS, "EVEN": x.shape[1] % _INPUTS == 0, "WIDE": interpreted(), "CHAINED": chain, "num_warps": 4,
        "launch_pdl": chain and early,
    }  # fmt: skip


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """Rows and inputs."""
    assert len(x) <= ROWS, "a program holds them all"
    assert x.stride(1) == weight.stride(1) == 1, "a row's numbers lie together"
    return x.shape[0], x.shape[1]
