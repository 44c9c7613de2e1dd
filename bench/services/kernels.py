"""The target's kernels on a CPU, each alone, against what it must read, and beside PyTorch's own.

product    rows times a weight, with the shapes of the default model's layers. Many copies of the weight take their
           turns, so that none stays in a cache. The floor is the time in which it can be read
attention  S sessions of so many rows each over paged keys and values, with a tree's mask, layer after layer; the floor
           is the time in which these can be read once
both       the bandwidth is measured beside, with as many threads
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from bench.harness.flags import whole
from bench.harness.report import Report
from bench.services.target import opening, prompt_of
from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention import NativeAttention
from services.target.kernels.cpu.bandwidth import read_bandwidth
from services.target.kernels.cpu.program import Buffer, Program
from services.target.kernels.cpu.weights import Format, PackedWeight, packed
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.step.batch import Batch, SessionWork, build

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 576, 1536, 9, 3, 64
# Outputs and inputs of the layers' weights.
WEIGHTS = {"qkv": (960, HIDDEN), "gate and up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "head": (49152, HIDDEN)}
FORMATS = {"bfloat16": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.INT4}
PAGE = 16
SPILL = 128 << 20  # bytes that take turns; more than caches hold
SCALE = DIM**-0.5
_LEAST, _LONGEST = 7, 1.0  # calls of a figure, and seconds of them


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/kernels.*. Raises ConfigError without the compiled kernels."""
    parser = argparse.ArgumentParser(prog="outrider bench kernels", description=__doc__)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rows", nargs="+", type=whole, default=[1, 8, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=whole, default=[128, 1024, 4096])
    parser.add_argument("--threads", type=whole, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    if not library.available():
        raise ConfigError("the compiled kernels cannot be had on this machine; a C++ compiler is needed")
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        measure(args)
    finally:
        torch.set_num_threads(before)


def measure(args: argparse.Namespace) -> None:
    """All kernels, and the report."""
    report = Report("kernels", "The target's kernels on a CPU, against their memory floors")
    for name in args.formats:
        for what, (outputs, inputs) in WEIGHTS.items():
            measure_products(report, name, what, torch.randn(outputs, inputs) / inputs**0.5, args.rows, args.threads)
    for sessions, rows in ((1, 1), (1, 16), (8, 4)):
        for context in args.contexts:
            measure_attention(report, sessions, rows, context, args.threads)
    report.notes += [
        "floor: the weight, or the keys and values, read once at the bandwidth of all threads; measured beside each",
        "PyTorch: functional.linear in bfloat16, or attention over gathered pages by its own operators",
        "of many rows it is the arithmetic that costs, not the memory: compare GFLOP/s there",
    ]
    report.write()


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of a call, after two that warm up."""
    for _ in range(2):
        call()
    times: list[float] = []
    while len(times) < _LEAST or (sum(times) < _LONGEST and len(times) < 50):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


# --- products ---


def measure_products(report: Report, name: str, what: str, weight: Tensor, rows: Sequence[int], threads: int) -> None:
    """A weight's products with several numbers of rows."""
    one = packed(weight, FORMATS[name])
    weights = [one, *(packed(weight, FORMATS[name]) for _ in range(SPILL // one.bytes))]
    plain = weight.bfloat16()
    plains = [plain, *(plain.clone() for _ in range(SPILL // (2 * plain.numel())))]
    for count in rows:
        before = read_bandwidth(threads)
        program, batch, cache = program_of(weights, count, threads)
        seconds = seconds_of(lambda: program.run(batch, cache)) / len(weights)  # noqa: B023 - called at once
        x = torch.randn(count, weight.shape[1], dtype=torch.bfloat16)
        theirs = seconds_of(lambda: [functional.linear(x, w) for w in plains]) / len(plains)  # noqa: B023
        floor = one.bytes / ((before + read_bandwidth(threads)) / 2)
        report.add(
            kernel=f"product, {name}", of=f"{what}, {weight.shape[0]} x {weight.shape[1]}", rows=count,
            us=1e6 * seconds, floor_us=1e6 * floor, **{"of floor": floor / seconds},
            **{"GFLOP/s": 2e-9 * count * weight.numel() / seconds, "PyTorch us": 1e6 * theirs},
            **{"times PyTorch": theirs / seconds},
        )  # fmt: skip


def program_of(weights: Sequence[PackedWeight], rows: int, threads: int) -> tuple[Program, Batch, KVCache]:
    """A program that multiplies rows with every weight in turn, and what it runs on."""
    inputs = weights[0].inputs
    program = Program(threads, torch.bfloat16, torch.bfloat16, inputs)
    program.embed(torch.randn(64, inputs, dtype=torch.bfloat16))
    for weight in weights:
        program.linear(weight, Buffer.RESIDUAL, Buffer.WIDE)
    session = Session(opening(1, np.zeros(rows, np.uint32), 1), PrefixCache(PageAllocator(64, PAGE)))
    session.table.reserve(rows)
    batch = build([SessionWork(Chunk(session, 0, rows))], CPU)
    return program, batch, KVCache([], 64, PAGE, torch.bfloat16, CPU)


# --- attention ---


def measure_attention(report: Report, sessions: int, rows: int, context: int, threads: int) -> None:
    """Attention of some sessions with a tree of rows each, over contexts of a length."""
    works, pages = works_of(sessions, rows, context)
    batch = build(works, CPU)
    shape = LayerShape(KV_HEADS, DIM, DIM)
    bytes_read = sessions * (context + rows) * 2 * KV_HEADS * DIM * 2
    cache = KVCache([shape] * max(2, SPILL // bytes_read), pages, PAGE, torch.bfloat16, CPU)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    q = torch.randn(len(batch), HEADS, DIM).bfloat16()
    before = read_bandwidth(threads)
    ours, theirs = (seconds_of(over_layers(kernel(batch), q, cache)) for kernel in (NativeAttention, GroupedAttention))
    floor = bytes_read / ((before + read_bandwidth(threads)) / 2)
    seconds = ours / len(cache.keys)
    report.add(
        kernel="attention, bfloat16", of=f"{sessions} sessions, {context} keys", rows=rows, us=1e6 * seconds,
        floor_us=1e6 * floor, **{"of floor": floor / seconds},
        **{"GFLOP/s": 4e-9 * sessions * rows * context * HEADS * DIM / seconds},
        **{"PyTorch us": 1e6 * theirs / len(cache.keys), "times PyTorch": theirs / ours},
    )  # fmt: skip


def over_layers(attention: Callable[..., Tensor], q: Tensor, cache: KVCache) -> Callable[[], object]:
    """A call that goes through all layers."""
    return lambda: [
        attention(q, keys, values, scaling=SCALE) for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def works_of(sessions: int, rows: int, context: int) -> tuple[list[SessionWork], int]:
    """Sessions with a root and a tree of the other rows behind so many keys, and pages that hold them."""
    pages = sessions * (-(-(context + rows) // PAGE) + 1)
    allocator = PageAllocator(pages, PAGE)
    works: list[SessionWork] = []
    for i in range(sessions):
        session = Session(opening(i, prompt_of(i, context), 1), PrefixCache(allocator))
        session.table.reserve(context + rows)
        works.append(SessionWork(Chunk(session, context - 1, context), tree_of(rows - 1)))
    return works, allocator.total_pages


def tree_of(nodes: int) -> TreeSlice:
    """A binary tree below a single child of the root."""
    parents = (np.arange(nodes, dtype=np.int32) - 1) // 2
    depths = np.ones(nodes, np.int32)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    return TreeSlice(np.full(nodes, 7, np.uint32), parents, depths, np.zeros(nodes, np.float32))
