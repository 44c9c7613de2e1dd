"""Gluon twins of small_batch_matmul.py that load the matrix before the previous launch has ended.

With programmatic dependent launch (dependent_launch.py) a program may start while the previous launch still runs. It
requests the first blocks of its matrix at once and only then waits for its input rows, so that memory stays busy during
norms and attention. Both operands pass through ring buffers in shared memory. Triton's pipelined loops cannot load one
operand before the other is available.

    ring   blocks of inputs in shared memory, [STAGES, LANES, outputs or rows, inputs of a lane]
    lane   inputs of a block that some warps sum alone: with as many lanes as warps, each warp has four short sums in
           place of a long one and reads the rows once; the lanes are added at the end
"""

# Gluon reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from services.target.kernels.cuda import dependent_launch, fused_elementwise
from services.target.kernels.cuda.dependent_launch import supports_dependent_launch

# The first name is that of newer versions, the second that of Triton 3.6.
ask_for = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
launch_dependents, wait = gluon.jit(dependent_launch.launch_dependents.fn), gluon.jit(dependent_launch.wait.fn)
activated, rotated = gluon.jit(fused_elementwise.activated.fn), gluon.jit(fused_elementwise.rotated.fn)
store_halves = gluon.jit(fused_elementwise.store_halves.fn)

_WARPS = 4
_ALIGNED = 16  # required alignment of row strides (numbers) and addresses (bytes) for copies to shared memory
_WIDEST = 256


@dataclass(frozen=True)
class Ring:
    """Ring buffer of a program. inputs: of a block, up to 256; stages: blocks in the ring; lanes: divisor of warps."""

    inputs: int
    stages: int
    lanes: int

    @property
    def constants(self) -> dict[str, int]:
        """Constants and options of a launch."""
        return {
            "INPUTS": self.inputs, "STAGES": self.stages, "LANES": self.lanes, "WARPS": _WARPS, "num_warps": _WARPS,
        }  # fmt: skip


# The fastest settings on an H200. With at most one program a multiprocessor (ALONE), a block must be computed fast; the
# ring takes the shared memory of two programs. The others leave room for two programs a multiprocessor, which hide one
# another's memory latency.
ALONE, MANY, GATED, TURNED = Ring(256, 5, 4), Ring(256, 3, 1), Ring(128, 4, 1), Ring(256, 4, 1)


def serves(x: Tensor, weight: Tensor) -> bool:
    """True if these kernels support the shape and the device. x: [T, inputs]; weight: [outputs, inputs]."""
    even = x.shape[1] % _WIDEST == 0 and x.stride(0) % _ALIGNED == weight.stride(0) % _ALIGNED == 0
    return even and _has_room(x.device) and x.data_ptr() % _ALIGNED == weight.data_ptr() % _ALIGNED == 0


@lru_cache
def _has_room(device: torch.device) -> bool:
    """True if the device has dependent launches and enough shared memory; compute capability 12 has less than half."""
    return supports_dependent_launch(device) and torch.cuda.get_device_capability(device)[0] in (9, 10)


@gluon.constexpr_function
def _wide(inputs, lanes, warps):
    """The layout of loads: 16 bytes a thread; neighbouring threads read from one row."""
    return gl.BlockedLayout([1, 1, 8], [lanes, 256 // inputs, inputs // lanes // 8], [1, warps, 1], [2, 0, 1])


@gluon.constexpr_function
def _mma(lanes, warps):
    """The layout of sums, [LANES, ROWS, OUTPUTS]: warps are divided among lanes, then among outputs."""
    return gl.NVMMADistributedLayout([2, 0], [lanes, 1, warps // lanes], [1, 16, 8])


@gluon.jit
def _of_block(INPUTS: gl.constexpr, LANES: gl.constexpr, wide: gl.constexpr):
    """Inputs of a block, [LANES, 1, inputs of a lane]."""
    lane = gl.arange(0, LANES, gl.SliceLayout(1, gl.SliceLayout(2, wide)))[:, None, None]
    part = gl.arange(0, INPUTS // LANES, gl.SliceLayout(0, gl.SliceLayout(1, wide)))[None, None, :]
    return lane * (INPUTS // LANES) + part


@gluon.jit
def _ring(
    HEIGHT: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr, number: gl.constexpr
):  # fmt: skip
    """Shared memory for blocks, [STAGES, LANES, HEIGHT, inputs of a lane], swizzled so that eight rows start in
    different banks.
    """
    width: gl.constexpr = INPUTS // LANES
    shared: gl.constexpr = gl.SwizzledSharedLayout(
        vec=8, per_phase=max(1, 64 // width), max_phase=min(8, width // 8), order=[2, 1, 0]
    )
    return gl.allocate_shared_memory(number, [STAGES, LANES, HEIGHT, width], shared)


@gluon.jit
def _ask_ahead(ring, matrix, inputs, INPUTS: gl.constexpr, STAGES: gl.constexpr):
    """Request the first blocks of the matrix. matrix: pointers to the numbers of the first block."""
    for nth in gl.static_range(STAGES - 1):
        if nth * INPUTS < inputs:
            ask_for(ring.index(nth), matrix + nth * INPUTS)
        async_copy.commit_group()


@gluon.jit
def _multiply(
    x, ring, matrix, rows, inputs, x_row,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr,
    wide: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Wait for the rows and multiply them with the matrix, whose first blocks are requested. [ROWS, OUTPUTS] float32.

    inputs: a multiple of INPUTS; wide, mma: layouts of loads and of sums
    """
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, wide)))[None, :, None]
    numbers = x + row * x_row + _of_block(INPUTS, LANES, wide)
    x_ring = _ring(ROWS, INPUTS, STAGES, LANES, x.dtype.element_ty)
    wait(True)
    for nth in gl.static_range(STAGES - 1):
        if nth * INPUTS < inputs:
            ask_for(x_ring.index(nth), numbers + nth * INPUTS, mask=row < rows)
        async_copy.commit_group()
    total = gl.zeros([LANES, ROWS, OUTPUTS], gl.float32, layout=mma)
    stage = 0
    free = STAGES - 1
    for begin in range(0, inputs, INPUTS):
        async_copy.wait_group(STAGES - 2)
        left = x_ring.index(stage).load(gl.DotOperandLayout(0, mma, 2))
        ahead = begin + (STAGES - 1) * INPUTS
        if ahead < inputs:
            ask_for(ring.index(free), matrix + ahead)
            ask_for(x_ring.index(free), numbers + ahead, mask=row < rows)
        async_copy.commit_group()
        right = ring.index(stage).permute([0, 2, 1]).load(gl.DotOperandLayout(1, mma, 2))
        total = mma_v2(left, right, total)
        free = stage
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    return gl.sum(total, 0)


@gluon.jit(do_not_specialize=["rows"])
def small_batch_linear(
    x, weight, bias, y, rows, outputs, inputs, x_row, w_row, y_row,
    ROWS: gl.constexpr, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr, LANES: gl.constexpr,
    BIAS: gl.constexpr, GATED: gl.constexpr, GELU: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `small_batch_matmul.small_batch_linear`. GATED: a program's outputs alternate between gates and values."""
    launch_dependents(True)
    wide: gl.constexpr = _wide(INPUTS, LANES, WARPS)
    mma: gl.constexpr = _mma(LANES, WARPS)
    EACH: gl.constexpr = 2 if GATED else 1
    own: gl.constexpr = OUTPUTS // EACH
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    output = gl.minimum(gl.program_id(0) * own + place // EACH, outputs - 1) + place % EACH * outputs
    matrix = (weight + output.to(gl.int64) * w_row)[None, :, None] + _of_block(INPUTS, LANES, wide)
    ring = _ring(OUTPUTS, INPUTS, STAGES, LANES, weight.dtype.element_ty)
    _ask_ahead(ring, matrix, inputs, INPUTS, STAGES)
    total = _multiply(x, ring, matrix, rows, inputs, x_row, ROWS, OUTPUTS, INPUTS, STAGES, LANES, wide, mma)
    rounded: gl.constexpr = y.dtype.element_ty
    if GATED:
        gate, value = gl.split(total.to(rounded).to(gl.float32).reshape([ROWS, own, 2]))
        total = activated(gate, GELU).to(rounded).to(gl.float32) * value
    row = gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))[:, None]
    output = gl.program_id(0) * own + gl.arange(0, own, gl.SliceLayout(0, total.type.layout))
    if BIAS:
        total += gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)[None, :]
    there = (row < rows) & (output < outputs)[None, :]
    gl.store(y + row * y_row + output[None, :], total.to(rounded), mask=there)


@gluon.jit(do_not_specialize=["rows"])
def small_batch_rotary(
    x, weight, bias, positions, slots, cosines, sines, queries, k_pool, v_pool, rows, inputs, x_row, w_row, q_row,
    k_page, k_slot, v_page, v_slot,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, D: gl.constexpr, HALF: gl.constexpr, PAGE: gl.constexpr,
    LIMIT: gl.constexpr, ROWS: gl.constexpr, PAIRS: gl.constexpr, INPUTS: gl.constexpr, STAGES: gl.constexpr,
    LANES: gl.constexpr, BIAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As `small_batch_matmul.small_batch_rotary`. A program's outputs alternate between the two halves of a head."""
    launch_dependents(True)
    wide: gl.constexpr = _wide(INPUTS, LANES, WARPS)
    mma: gl.constexpr = _mma(LANES, WARPS)
    OUTPUTS: gl.constexpr = 2 * PAIRS
    head = gl.program_id(0) // (HALF // PAIRS)
    first = gl.program_id(0) % (HALF // PAIRS) * PAIRS
    place = gl.arange(0, OUTPUTS, gl.SliceLayout(0, gl.SliceLayout(2, wide)))
    output = head * D + first + place // 2 + place % 2 * HALF
    matrix = (weight + output.to(gl.int64) * w_row)[None, :, None] + _of_block(INPUTS, LANES, wide)
    ring = _ring(OUTPUTS, INPUTS, STAGES, LANES, weight.dtype.element_ty)
    _ask_ahead(ring, matrix, inputs, INPUTS, STAGES)
    sums: gl.constexpr = gl.SliceLayout(0, mma)
    like, _ = gl.split(gl.zeros([ROWS, OUTPUTS], gl.float32, layout=sums).reshape([ROWS, PAIRS, 2]))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, like.type.layout))
    at = first + gl.arange(0, PAIRS, gl.SliceLayout(0, like.type.layout))[None, :]
    there = row < rows
    angle = gl.load(positions + row, mask=there, other=0)[:, None] * HALF + at
    cosine, sine = gl.load(cosines + angle), gl.load(sines + angle)
    slot = gl.load(slots + row, mask=there, other=0)[:, None]
    total = _multiply(x, ring, matrix, rows, inputs, x_row, ROWS, OUTPUTS, INPUTS, STAGES, LANES, wide, mma)
    if BIAS:
        place = gl.arange(0, OUTPUTS, gl.SliceLayout(0, sums))
        output = head * D + first + place // 2 + place % 2 * HALF
        total += gl.load(bias + output).to(gl.float32)[None, :]
    rounded: gl.constexpr = queries.dtype.element_ty
    left, right = gl.split(total.to(rounded).to(gl.float32).reshape([ROWS, PAIRS, 2]))
    if head < HEADS + KV_HEADS:
        left, right = rotated(left, right, cosine, sine)
    store_halves(
        left.to(rounded), right.to(rounded), head, row, at, there, slot, queries, k_pool, v_pool, q_row, k_page, k_slot,
        v_page, v_slot, HEADS, KV_HEADS, D, HALF, PAGE, LIMIT,
    )  # fmt: skip
