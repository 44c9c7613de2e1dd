"""Steps of an 8-billion-parameter target on a GPU against their floor.

The model has the dimensions of Llama-3-8B and random weights, made on the device. The floor of a step is the time to
read its weights and the keys and values of its sessions. Whole steps are timed on the host's clock: building and
copying the tables, the forward pass, sampling and copying the samples back.

    step      plain decoding and verification by sessions and context, with and without CUDA graphs
    compiled  the same with compiled layers
    engine    steps of the whole engine, including planning and commits, with and without overlap; with draft tokens,
              step by step and prepared by the device
    attention the kernel alone against its own floor, by tile: (rows x heads) x keys, keys per split, warps, stages

    system    the whole system: target, draft service and gateway as three processes, over REST; a page of its own
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.gpu.cases import GREEDY, PAGE, TINY, VERIFIED, Size, sessions
from bench.gpu.clocks import Clocks
from bench.gpu.system import run as system
from bench.harness.errors import BenchError
from bench.harness.report import Report, chosen_folder, format_row, new_figure
from outrider.config import TargetConfig
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Proposal
from outrider.speculation.sampling import StopConditions
from services.target.engine.engine import TargetEngine
from services.target.kernels.dispatch import choose
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, token_bytes
from services.target.model import attention
from services.target.model.base import Model, Runner
from services.target.model.cuda.graphs import CudaCapturer, GraphRunner, direct
from services.target.model.loading.probe import pass_a_token
from services.target.model.modules import ModuleRunner
from services.target.sampling import sampler
from services.target.sampling.row_params import RowRequest, gather
from services.target.speculation.modes.mode import SpeculationMode
from services.target.step.batch import SessionWork, build

SPARE_BYTES = 6 << 30  # reserved for activations of steps and of CUDA graphs
PARTS = ("system", "engine", "step", "compiled", "attention")  # the system first, because it needs all of the memory


def main(argv: Sequence[str]) -> None:
    """Measure, and write docs/benchmarks/gpu.*."""
    parser = argparse.ArgumentParser(
        prog="outrider bench gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="measurements (default: all)")
    parser.add_argument("--name", default="gpu", help="name of the target's report; the system's is gpu-system")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU to test this benchmark")
    system.add_flags(parser)
    flags = parser.parse_args(argv)
    selection = system.selection_of(flags, parser)
    if not flags.tiny and not torch.cuda.is_available():
        raise SystemExit("there is no GPU on this machine; --tiny tests this benchmark on the CPU")
    failure = measure_system(selection, tiny=flags.tiny) if "system" in flags.parts else None
    parts = [part for part in flags.parts if part != "system"]
    if parts:
        measure_parts(parts, flags.name, tiny=flags.tiny)
    if failure is not None:
        raise failure


def measure_parts(parts: Sequence[str], name: str, *, tiny: bool) -> None:
    """Measure the target alone, and write docs/benchmarks/NAME.* after each part.

    tiny: writes only into a folder that was named
    """
    report = Report(name, "The target on a GPU: steps of a model of 8 billion parameters")
    bench = Bench(TINY if tiny else Size(), torch.device("cpu" if tiny else "cuda"), report)
    for _ in bench.run(parts):
        if _keeps(tiny=tiny):
            plot(report)
            report.write()


def measure_system(selection: system.Selection, *, tiny: bool) -> BenchError | None:
    """Measure the whole system, and write docs/benchmarks/gpu-system.*, or gpu-system-apart.* with the draft on another
    device, after each cell.

    tiny: writes only into a folder that was named. Returns the error that ended it, so that other parts still run.
    """
    name = "gpu-system" if selection.draft_device == "auto" else "gpu-system-apart"
    report, keeps = Report(name, system.TITLE), _keeps(tiny=tiny)
    try:
        for _ in system.measure(selection, report, tiny=tiny, draws=keeps):
            if keeps:
                report.write()
    except BenchError as error:
        report.notes.append(f"The system failed: {error}")
        print(report.notes[-1], flush=True)
        if keeps and report.rows:
            report.write()
        return error
    return None


def _keeps(*, tiny: bool) -> bool:
    """True if reports are written: those of a tiny model do not belong to the others."""
    return not tiny or chosen_folder() is not None


class Bench:
    """One run for a report. The failure of a part becomes a note, and the other parts still run."""

    def __init__(self, size: Size, device: torch.device, report: Report) -> None:
        self.size, self.device, self.report = size, device, report
        self.clocks = Clocks(device, size.repeats)
        self.shape = LayerShape(size.kv_heads, size.hidden // size.heads, size.hidden // size.heads)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.token_bytes = token_bytes([self.shape] * size.layers, self.dtype)
        self.bandwidth = self.clocks.read_bandwidth()
        report.notes.append(f"Measured read bandwidth: {self.bandwidth / 1e9:,.0f} GB/s.")
        report.columns = ("what", "how", "sessions", "rows", "context", "ms", "floor ms", "of floor", "to plain")

    def run(self, parts: Sequence[str]) -> Iterator[None]:
        """Measure parts by name; yields after each."""
        with torch.inference_mode():
            if {"step", "engine", "compiled"} & set(parts):
                with self.note_failure("model"):
                    module = self.module()
                    for part in PARTS:
                        if part in parts and part in ("step", "engine", "compiled"):
                            with self.note_failure(part):
                                getattr(self, part)(module)
                            self.free()
                            yield
                    del module
                self.free()
            if "attention" in parts:
                self.attention()
                yield

    @contextlib.contextmanager
    def note_failure(self, what: str) -> Iterator[None]:
        """Turn an exception inside the context into a note of the report."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.report.notes.append(f"{what} failed: {str(error).splitlines()[0] if str(error) else repr(error)}")

    def free(self) -> None:
        """Release the memory of the previous measurement."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def module(self) -> Any:
        """A random model on the device."""
        size = self.size
        config = AutoConfig.for_model(
            "llama", vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.inner,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.kv_heads,
            max_position_embeddings=131072, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            rms_norm_eps=1e-5, tie_word_embeddings=False,
        )  # fmt: skip
        with self.device:
            module = AutoModelForCausalLM.from_config(
                config, dtype=self.dtype, attn_implementation=attention.registered()
            )
        return module.eval().requires_grad_(False)

    # --- steps ---

    def step(self, module: Any) -> None:
        """Plain steps and verification."""
        cells = self.fitting(self.size.cells)
        cache, modules = self.cache(cells), ModuleRunner(module, choose("auto", self.device))
        with self.note_failure("modules"):
            self.cell("modules", modules, cache, self.weights(module), *cells[0])
            self.cell("modules, graph", self.capture(modules, cells[:1], cache), cache, self.weights(module), *cells[0])
        graphs = self.capture(self.fused(module), cells, cache)
        for count, context in cells:
            with self.note_failure(f"{count} sessions, {context} tokens"):
                self.cell("graph", graphs, cache, self.weights(module), count, context)

    def fused(self, module: Any) -> ModuleRunner:
        """The runner of the model as served: fused kernels on a GPU."""
        planner = choose("auto", self.device)
        if self.device.type != "cuda":
            return ModuleRunner(module, planner)
        from services.target.model.cuda.fused import FusedRunner

        longest = max(context for _, context in self.size.cells) + VERIFIED
        return FusedRunner(module, planner, pass_a_token(module, self.device), longest)

    def compiled(self, module: Any) -> None:
        """Steps with compiled layers. Runs last: the layers of the module stay compiled."""
        from services.target.model.cuda.compiled import compiled

        cells = self.size.compiled
        most = max(count for count, _ in cells) * VERIFIED
        cache, runner = self.cache(cells), compiled(ModuleRunner(module, choose("auto", self.device)), most)
        graphs = self.capture(runner, cells, cache)
        for count, context in cells:
            self.cell("modules, graph, compiled", graphs, cache, self.weights(module), count, context)

    def fitting(self, cells: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The cells whose KV cache fits into the device's memory beside the weights; the others become notes."""
        if self.device.type != "cuda":
            return cells
        room = torch.cuda.mem_get_info(self.device)[0] - SPARE_BYTES
        fitting = [(count, context) for count, context in cells if count * (context + 64) * self.token_bytes <= room]
        for count, context in set(cells) - set(fitting):
            self.report.notes.append(f"{count} sessions of {context} tokens do not fit into the device's memory.")
        return fitting

    def cache(self, cells: Sequence[tuple[int, int]]) -> KVCache:
        """A zeroed KV cache that is large enough for each of the cells."""
        tokens = max(count * (context + 2 * VERIFIED) for count, context in cells)
        pages = -(-tokens // PAGE) + 2 * max(count for count, _ in cells)
        cache = KVCache([self.shape] * self.size.layers, pages, PAGE, self.dtype, self.device)
        for pool in (*cache.keys, *cache.values):
            pool.zero_()
        return cache

    def weights(self, module: Any) -> int:
        """Bytes of weights that every step reads: all except the embedding, of which it reads a few rows."""
        read: int = sum(p.numel() * p.element_size() for p in module.parameters())
        embedding: int = module.get_input_embeddings().weight.numel() * self.dtype.itemsize
        return read - embedding

    def capture(self, runner: ModuleRunner, cells: Sequence[tuple[int, int]], cache: KVCache) -> GraphRunner:
        """The runner with CUDA graphs of plain and verification steps."""
        rows = {count for count, _ in cells}
        rows |= {count * VERIFIED for count in rows if count <= self.size.verify_up_to}
        capturer = CudaCapturer() if self.device.type == "cuda" else direct
        graphs = GraphRunner(runner, sorted(rows), capturer)
        start = time.perf_counter()
        graphs.capture(cache, self.device)
        self.report.notes.append(f"{len(rows)} steps were captured in {time.perf_counter() - start:.1f} s.")
        return graphs

    def cell(self, how: str, runner: Runner, cache: KVCache, read: int, count: int, context: int) -> None:
        """Measure a plain step and a verification step of `count` sessions. read: bytes of weights."""
        plain = 0.0
        for rows in (1, VERIFIED) if count <= self.size.verify_up_to else (1,):
            works = sessions(count, context, rows, cache)
            requests = [RowRequest(GREEDY, [context] * rows, [[]] * rows) for _ in range(count)]

            def once(works: Sequence[SessionWork] = works, requests: Sequence[RowRequest] = requests) -> None:
                batch = build(works, self.device)
                drawn = gather(requests, self.device)
                sampler.sample(runner.forward(batch, cache).logits, drawn).cpu()

            seconds = self.clocks.host(once)
            plain = plain or seconds
            floor = self.floor(read, count, context)
            self.add("verification" if rows > 1 else "plain step", how, count, rows, context, seconds, floor, plain)

    def floor(self, read: int, count: int, context: int) -> float:
        """Seconds to read the weights and the sessions' keys and values. read: bytes of weights."""
        return (read + count * context * self.token_bytes) / self.bandwidth

    # --- the whole engine ---

    def engine(self, module: Any) -> None:
        """Plain steps of the engine: greedy sessions with prompts of 1000 tokens."""
        most = max(self.size.engine_sessions)
        config = TargetConfig(
            max_running_requests=most, max_total_tokens=most * 1200, chunked_prefill_size=4096, page_size=PAGE
        )
        model = Model(
            runner=self.fused(module), device=self.device, dtype=self.dtype, cache_dtype=self.dtype,
            architecture="random", vocab_size=self.size.vocab, hidden_size=self.size.hidden, context_length=4096,
            eos_token_ids=(), shapes=tuple([self.shape] * self.size.layers),
        )  # fmt: skip
        rows = (1, VERIFIED)
        for count, tokens, overlap in itertools.product(self.size.engine_sessions, rows, (False, True)):
            if tokens > 1 and count > self.size.verify_up_to:
                continue
            how = ("graph, prepared" if tokens > 1 else "graph, overlapping") if overlap else "graph"
            with self.note_failure(f"engine, {count} sessions, {tokens} rows, {how}"):
                self.engine_cell(how, model, config, self.weights(module), count, tokens, overlap=overlap)
            self.free()  # an engine and its pools form a reference cycle

    def engine_cell(
        self, how: str, model: Model, config: TargetConfig, read: int, count: int, rows: int, *, overlap: bool
    ) -> None:
        """Measure steps of an engine with `count` sessions of `rows` tokens: a root, and wrong draft tokens."""
        assert isinstance(model.runner, ModuleRunner), "`fused` builds it"
        graphs = GraphRunner(model.runner, [count * rows], CudaCapturer() if self.device.type == "cuda" else direct)
        engine = TargetEngine(replace(model, runner=graphs), config, [SpeculationMode.DRAFT_IF_READY])
        graphs.capture(engine.cache, self.device)
        engine.overlap, engine.launcher.prepares = overlap, overlap and engine.launcher.prepares
        engine.speculation.planner.max_tokens = rows
        tokens = np.arange(1000, dtype=np.uint32) % 500
        for i in range(count):
            stop = StopConditions(max_tokens=180, ignore_eos=True)
            engine.open(OpenSession(i, np.roll(tokens, i), len(tokens), GREEDY, stop))
        while len(engine.step().commits) < count:
            pass
        seconds = self.clocks.pace(engine.step if rows == 1 else partial(drafted_step, engine, rows))
        self.add("engine's step", how, count, rows, len(tokens), seconds, self.floor(read, count, len(tokens)), None)

    # --- the attention kernel ---

    def attention(self) -> None:
        """Measure the attention kernel alone, if it is Triton's."""
        if choose("auto", self.device).__name__ != "TritonAttention":
            return
        from bench.gpu import tiles

        table: list[dict[str, Any]] = []
        self.report.more = [("Attention of a layer", table)]
        arguments = (self.shape, self.size.heads, self.dtype, self.clocks, self.bandwidth, self.note_failure)
        for row in tiles.measure_tiles(*arguments):
            table.append(row)
            print(format_row(row), flush=True)

    def add(
        self, what: str, how: str, sessions: int, rows: int, context: int, seconds: float, floor: float | None,
        plain: float | None,
    ) -> None:  # fmt: skip
        """Add a row to the report. rows: tokens of a session in the step."""
        row: dict[str, Any] = {"what": what, "how": how, "sessions": sessions, "rows": rows, "context": context}
        row["ms"] = round(seconds * 1e3, 4)
        if floor is not None:
            row |= {"floor ms": round(floor * 1e3, 4), "of floor": round(floor / seconds, 3)}
        if plain is not None and rows > 1:
            row["to plain"] = round(seconds / plain, 3)
        self.report.add(**row)


def drafted_step(engine: TargetEngine, rows: int) -> None:
    """A step of an engine to which each session's next draft tokens are sent first, enough for two steps."""
    count = 2 * rows + rows // 2
    tokens, parents = np.full(count, 7, np.uint32), np.arange(-1, count - 1, dtype=np.int32)
    scores = np.full(count, -0.1, np.float32)
    for session_id in list(engine.sessions.by_id):
        tree = engine.sessions.by_id[session_id].tree
        proposal = Proposal(session_id, tree.length, tree.root_hash, tokens, parents, scores, tree.length)
        engine.receive([proposal], ())
    engine.step()


def plot(report: Report) -> None:
    """Milliseconds of steps and their floor, by sessions and context."""
    rows = [row for row in report.rows if row["how"] == "graph" and row["what"] != "engine's step"]
    cells = list(dict.fromkeys((row["sessions"], row["context"]) for row in rows))
    figure = new_figure(11, 3.5)
    axes = figure.subplots()
    for nth, what in enumerate(("floor", "plain step", "verification")):
        found = [row for row in rows if row["what"] == (what if nth else "plain step")]
        heights = [row["ms" if nth else "floor ms"] for row in found]
        positions = [cells.index((row["sessions"], row["context"])) + 0.27 * (nth - 1) for row in found]
        label = f"verification of {VERIFIED} tokens per session" if nth == 2 else what
        axes.bar(positions, heights, 0.25, label=label, color=("0.75", "tab:blue", "tab:orange")[nth])
    axes.set(xticks=range(len(cells)), ylabel="ms")
    axes.set_xticklabels([f"{count} x {context:,}" for count, context in cells])
    axes.set_xlabel("sessions x tokens of context")
    axes.legend(frameon=False)
    report.save(figure)
