"""Kernels of the target on a CPU, each alone, against their floor and against PyTorch.

product    rows times a weight, with the shapes of a model's layers. Copies of the weight alternate, so that none stays
           in a cache. The floor is the time to read the weight
attention  sessions with a draft tree each over paged keys and values, layer by layer. The floor is the time to read the
           keys and values once

The bandwidth is measured before and after each kernel with the same number of threads.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor
from torch.nn import functional

from bench.harness.flags import positive_int
from bench.harness.report import Report
from bench.services.target import open_request, random_prompt
from outrider.errors import ConfigError
from outrider.native import vectors
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import TreeSlice
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention.paged import NativeAttention
from services.target.kernels.cpu.bandwidth import read_bandwidth
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight, stored_format
from services.target.kernels.cpu.programs.program import Buffer, Program
from services.target.kernels.grouped import GroupedAttention
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.step.batch import Batch, SessionWork, build

CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, DIM = 576, 1536, 9, 3, 64
# Outputs and inputs of the layers' weights.
WEIGHTS = {"qkv": (960, HIDDEN), "gate and up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER), "head": (49152, HIDDEN)}
WEIGHTS_1_5B = {"output": (1536, 1536), "gate": (8960, 1536), "down": (1536, 8960), "head": (151936, 1536)}
FORMATS = {"bfloat16": Format.BFLOAT16, "int8": Format.INT8, "int4": Format.INT4}
FLOAT8 = "float8"  # of FP8 checkpoints, with a scale for each 128 inputs
STORED = ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0")  # GGUF types, in block formats
PAGE = 16
SPILL = 128 << 20  # bytes of alternating operands; more than the caches
SCALE = DIM**-0.5
MAX_SECONDS = 1.0  # of the calls of a figure
_MIN_CALLS, _MAX_CALLS = 7, 50


def main(argv: Sequence[str]) -> None:
    """Measure and write docs/benchmarks/kernels.*. Raises ConfigError without the compiled kernels."""
    parser = argparse.ArgumentParser(prog="outrider bench kernels", description=__doc__)
    parser.add_argument("--model", choices=("default", "1.5b"), default="default",
                        help="whose shapes; 1.5b: products only, in kernels-1.5b.*")  # fmt: skip
    parser.add_argument("--formats", nargs="+", choices=(*FORMATS, FLOAT8, *STORED), default=list(FORMATS),
                        help="of weights; float8: those of FP8 checkpoints; Q names: those of GGUF files")  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=positive_int, default=[1, 8, 16, 64], help="rows of products")
    parser.add_argument("--contexts", nargs="+", type=positive_int, default=[128, 1024, 4096],
                        help="context lengths of attention, in tokens")  # fmt: skip
    parser.add_argument("--threads", type=positive_int, default=torch.get_num_threads())
    args = parser.parse_args(argv)
    if not library.available():
        raise ConfigError("the compiled kernels are not available; install a C++ compiler")
    torch.manual_seed(0)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        measure(args)
    finally:
        torch.set_num_threads(before)


def measure(args: argparse.Namespace) -> None:
    """Measure all kernels and write the report."""
    default = args.model == "default"
    name = "kernels" if default else f"kernels-{args.model}"
    report = Report(name, f"Kernels of the target on a CPU against their floors, {vectors.chosen().name}")
    for name in args.formats:
        for what, (outputs, inputs) in (WEIGHTS if default else WEIGHTS_1_5B).items():
            measure_products(report, name, what, outputs, inputs, args.rows, args.threads)
    for sessions, rows in ((1, 1), (1, 16), (8, 4)) if default else ():
        for context in args.contexts:
            measure_attention(report, sessions, rows, context, args.threads)
    report.notes += [
        "floor: reading the weight, or the keys and values, once at the bandwidth of all threads, measured with each",
        "PyTorch: functional.linear in bfloat16, or attention over gathered pages with PyTorch's operators",
        "with many rows arithmetic is the limit, not memory: compare GFLOP/s",
    ]
    report.write()


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of a call, after two calls for warm-up."""
    for _ in range(2):
        call()
    times: list[float] = []
    while len(times) < _MIN_CALLS or (sum(times) < MAX_SECONDS and len(times) < _MAX_CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


# --- products ---


def measure_products(
    report: Report, name: str, what: str, outputs: int, inputs: int, rows: Sequence[int], threads: int
) -> None:
    """Measure products of a weight with several numbers of rows."""
    one = random_weight(name, outputs, inputs)
    weights = [one, *(random_weight(name, outputs, inputs) for _ in range(SPILL // one.bytes))]
    numbers = outputs * inputs
    plains = [torch.zeros(outputs, inputs, dtype=torch.bfloat16) for _ in range(1 + SPILL // (2 * numbers))]
    for count in rows:
        before = read_bandwidth(threads)
        program, batch, cache = program_of(weights, count, threads)
        seconds = seconds_of(lambda: program.run(batch, cache)) / len(weights)  # noqa: B023 - called at once
        x = torch.randn(count, inputs, dtype=torch.bfloat16)
        theirs = seconds_of(lambda: [functional.linear(x, w) for w in plains]) / len(plains)  # noqa: B023
        floor = one.bytes / ((before + read_bandwidth(threads)) / 2)
        report.add(
            kernel=f"product, {name}", of=f"{what}, {outputs} x {inputs}", rows=count,
            us=1e6 * seconds, floor_us=1e6 * floor, **{"of floor": floor / seconds, "GB/s": 1e-9 * one.bytes / seconds},
            **{"GFLOP/s": 2e-9 * count * numbers / seconds, "PyTorch us": 1e6 * theirs},
            **{"speedup over PyTorch": theirs / seconds},
        )  # fmt: skip


def random_weight(name: str, outputs: int, inputs: int) -> PackedWeight:
    """A weight of random numbers in one of FORMATS, FLOAT8 or STORED."""
    if name in FORMATS:
        weight = PackedWeight(outputs, inputs, FORMATS[name], rough=True)  # the search for scales takes long
        weight.fill(torch.arange(outputs), torch.randn(outputs, inputs) / inputs**0.5)
        return weight
    if name == FLOAT8:
        weight = PackedWeight(outputs, inputs, Format.FLOAT8, groups=2)
        codes = torch.randn(outputs, inputs).mul_(100).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.full((outputs, -(-inputs // 128)), 0.01)
        weight.fill_blocks(torch.arange(outputs), codes, scale_units=scales)
        return weight
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    number_format = stored_format(name)
    assert number_format is not None, "STORED names types with a block format"
    weight = PackedWeight(outputs, inputs, number_format)
    finite = 0x30  # bytes below are no part of infinite half-precision numbers
    rows = torch.randint(0, finite, (outputs, inputs // block * size), dtype=torch.uint8)
    weight.fill_stored(torch.arange(outputs), rows, name)
    return weight


def program_of(weights: Sequence[PackedWeight], rows: int, threads: int) -> tuple[Program, Batch, KVCache]:
    """A program that multiplies rows with every weight in turn, with its batch and an empty cache."""
    inputs = weights[0].inputs
    program = Program(threads, torch.bfloat16, torch.bfloat16, inputs)
    program.embed(torch.randn(64, inputs, dtype=torch.bfloat16))
    for weight in weights:
        program.linear(weight, Buffer.RESIDUAL, Buffer.WIDE)
    session = Session(open_request(1, np.zeros(rows, np.uint32), 1), PrefixCache(PageAllocator(64, PAGE)))
    session.table.reserve(rows)
    batch = build([SessionWork(Chunk(session, 0, rows))], CPU)
    return program, batch, KVCache([], 64, PAGE, torch.bfloat16, CPU)


# --- attention ---


def measure_attention(report: Report, sessions: int, rows: int, context: int, threads: int) -> None:
    """Measure attention of sessions with `rows` tokens each (a root and its tree) over `context` tokens."""
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
        kernel="attention, bfloat16", of=f"{sessions} sessions, {context} tokens", rows=rows, us=1e6 * seconds,
        floor_us=1e6 * floor, **{"of floor": floor / seconds},
        **{"GFLOP/s": 4e-9 * sessions * rows * context * HEADS * DIM / seconds},
        **{"PyTorch us": 1e6 * theirs / len(cache.keys), "speedup over PyTorch": theirs / ours},
    )  # fmt: skip


def over_layers(attention: Callable[..., Tensor], q: Tensor, cache: KVCache) -> Callable[[], object]:
    """A call of the kernel for all layers."""
    return lambda: [
        attention(q, keys, values, scaling=SCALE) for keys, values in zip(cache.keys, cache.values, strict=True)
    ]


def works_of(sessions: int, rows: int, context: int) -> tuple[list[SessionWork], int]:
    """Work of sessions with a root and a tree of `rows - 1` nodes after `context` tokens, and the number of pages."""
    pages = sessions * (-(-(context + rows) // PAGE) + 1)
    allocator = PageAllocator(pages, PAGE)
    works: list[SessionWork] = []
    for i in range(sessions):
        session = Session(open_request(i, random_prompt(i, context), 1), PrefixCache(allocator))
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
