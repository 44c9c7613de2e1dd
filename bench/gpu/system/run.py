"""Cells of the system's measurement, and their report.

Every cell is a transport, a context and a number of sessions; small ones come first. In it, plain decoding and
speculation at each accept length take turns over the same prompts, whose beginnings are cached: a turn is one answer of
every session. The first turn of each kind is for warm-up. Cells that do not fit into the device's memory, or into the
given time, become notes.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.gpu.clocks import Clocks
from bench.gpu.system import load, processes, split
from bench.gpu.system.checkpoints import TINY_MODEL, ModelSizes
from bench.gpu.system.recording import Recordings, Rows
from bench.harness.flags import positive_float, positive_int
from bench.harness.prompts import token_prompts
from bench.harness.report import Report, new_figure
from outrider.checkpoints.checkpoint import resolve
from outrider.checkpoints.sizes import CheckpointSizes
from outrider.placement.devices import gpu_memory

_SPARE_BYTES = 10 << 30  # of the device: graphs and activations of the target, the draft's programs
_SPARE_TOKENS = 80  # of a session's cache, beside context and answer: its draft tree
_REAL = "as drafted"  # in place of a simulated accept length
_CAPTURE_SECONDS = 120.0  # in which an idle target has captured its steps with hidden states
_MEMORY_FILES = Path("/dev/shm")  # where the random pair is written if there is room, because disks are slow

TITLE = "The whole system on a GPU: target, draft service and gateway as processes, over REST"


@dataclass(frozen=True)
class Selection:
    """What is measured.

    accept_lengths: simulated ones. seconds: in which cells begin, start-up included. model, head: folders of a real
    pair, or None. tree: steps, topk and draft tokens of explicit trees; None for adaptive ones. always: steps wait for
    the draft, whether that pays or not
    """

    transports: tuple[str, ...] = ("grpc", "socket")
    contexts: tuple[int, ...] = (1024, 8192)
    sessions: tuple[int, ...] = (1, 4, 16, 64)
    accept_lengths: tuple[float, ...] = (2.0, 3.0, 4.0)
    new_tokens: int = 256
    rounds: int = 2
    seconds: float = 500.0
    tree: tuple[int, int, int] | None = None
    model: str | None = None
    head: str | None = None
    draft_device: str = "auto"
    always: bool = False


TINY_SELECTION = Selection(
    transports=("grpc", "socket"), contexts=(64,), sessions=(2,), accept_lengths=(3.0,), new_tokens=48, rounds=1,
    tree=(3, 1, 4), always=True,  # a tiny target is too quick for speculation to pay
)  # fmt: skip


class Kind(NamedTuple):
    """A kind of turn. accept_length: that is simulated, or "as drafted"; None for plain decoding. seed: of requests"""

    accept_length: float | str | None
    seed: int = 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `--parts system`."""
    usual, group = Selection(), parser.add_argument_group("part system")
    group.add_argument("--transports", nargs="+", choices=("grpc", "socket"), default=usual.transports)
    group.add_argument("--contexts", nargs="+", type=positive_int, default=usual.contexts, help="tokens of a prompt")
    group.add_argument("--sessions", nargs="+", type=positive_int, default=usual.sessions, help="concurrent requests")
    group.add_argument("--accept-lengths", nargs="+", type=positive_float, default=usual.accept_lengths,
                       help="simulated accept lengths")  # fmt: skip
    group.add_argument("--new-tokens", type=positive_int, default=usual.new_tokens, help="tokens of an answer")
    group.add_argument("--rounds", type=positive_int, default=usual.rounds, help="turns of each kind")
    group.add_argument("--seconds", type=positive_float, default=usual.seconds,
                       help="no cell begins later than this, start-up included")  # fmt: skip
    group.add_argument("--tree", nargs=3, type=positive_int, metavar=("STEPS", "TOPK", "TOKENS"),
                       help="explicit trees, as of --speculative-num-steps etc.; default: adaptive")  # fmt: skip
    group.add_argument("--model-path", help="a real target; needs --speculative-draft-model-path")
    group.add_argument("--speculative-draft-model-path", help="its EAGLE-3 head, whose own acceptance is measured")
    group.add_argument("--draft-device", default=usual.draft_device, help="such as cuda:1; default: the target's")


def selection_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Selection:
    """What the flags select. Exits with a usage error for half a pair."""
    if (args.model_path is None) != (args.speculative_draft_model_path is None):
        parser.error("a real pair needs both --model-path and --speculative-draft-model-path")
    chosen: dict[str, Any] = {
        "seconds": args.seconds, "model": args.model_path, "head": args.speculative_draft_model_path,
        "draft_device": args.draft_device,
    }  # fmt: skip
    if args.tree:
        chosen["tree"] = tuple(args.tree)
    if args.tiny:
        return replace(TINY_SELECTION, **chosen)
    lists: dict[str, Any] = {
        name: tuple(getattr(args, name)) for name in ("transports", "contexts", "sessions", "accept_lengths")
    }
    return Selection(**lists, new_tokens=args.new_tokens, rounds=args.rounds, **chosen)


def measure(selection: Selection, report: Report, *, tiny: bool, draws: bool) -> Iterator[None]:
    """Measure all cells; yields after each. tiny: a tiny random model on the CPU. draws: saves the timeline."""
    on_cuda = not tiny
    deadline = time.monotonic() + selection.seconds
    device = torch.device("cuda" if on_cuda else "cpu")
    bandwidth = Clocks(device, 1).read_bandwidth()
    if on_cuda:
        torch.cuda.empty_cache()
    report.notes += _notes(selection, bandwidth)
    sizes = TINY_MODEL if tiny else ModelSizes()
    with tempfile.TemporaryDirectory(prefix="outrider-gpu-", dir=_folder_for(sizes)) as where:
        system = System(Path(where), selection, report, bandwidth, deadline, on_cuda=on_cuda, draws=draws)
        yield from system.measure(sizes)


def _folder_for(sizes: ModelSizes) -> Path | None:
    """A folder in memory that has room for a random pair twice; None for the usual one."""
    room = shutil.disk_usage(_MEMORY_FILES).free if _MEMORY_FILES.is_dir() else 0
    return _MEMORY_FILES if room > 2 * sizes.file_bytes else None


class System:
    """One run of the three processes, for a report."""

    def __init__(
        self, folder: Path, selection: Selection, report: Report, bandwidth: float, deadline: float, *, on_cuda: bool,
        draws: bool,
    ) -> None:  # fmt: skip
        """folder: for checkpoints, sockets and recordings. bandwidth: of the target's device, in bytes/s.

        deadline: after which no cell begins, by the monotonic clock. draws: saves the timeline of the first cell
        """
        self.folder, self.selection, self.report = folder, selection, report
        self.bandwidth, self.deadline, self.on_cuda = bandwidth, deadline, on_cuda
        self.recordings = [Recordings(folder, role) for role in ("target", "draft")]
        self._draws = draws

    def measure(self, sizes: ModelSizes) -> Iterator[None]:
        """Start the services and measure all cells. sizes: of the random pair, if no real one was named."""
        chosen = self.selection
        simulated: dict[str, Any] | None = None
        if chosen.model is not None and chosen.head is not None:
            model, head = resolve(chosen.model), resolve(chosen.head)
            prompts = [token_prompts(model, context, max(chosen.sessions)) for context in chosen.contexts]
        else:
            device = "cuda" if self.on_cuda else "cpu"
            model, head = processes.write_checkpoints(self.folder, sizes, device)
            text = sizes.continuation
            simulated = {"first": text.first, "size": text.size, "accept_lengths": chosen.accept_lengths}
            random = np.random.default_rng(0)
            shapes = [(max(chosen.sessions), context) for context in chosen.contexts]
            prompts = [(text.first + random.integers(0, text.size, shape)).tolist() for shape in shapes]
        cells = self._fitting(model)
        if not cells:
            return
        yield from self._cells(model, head, simulated, cells, dict(zip(chosen.contexts, prompts, strict=True)))

    def _fitting(self, model: Path) -> list[tuple[int, int]]:
        """Contexts and sessions whose KV cache fits into the device's memory; the others become notes."""
        chosen = self.selection
        cells = [(context, count) for context in chosen.contexts for count in chosen.sessions]
        cells.sort(key=lambda cell: cell[0] * cell[1])
        total = gpu_memory() if self.on_cuda else None
        if total is None:
            return cells
        sizes = CheckpointSizes(model)
        room = total - sizes.weights() - _SPARE_BYTES
        fitting = [cell for cell in cells if self._tokens(*cell) * sizes.token_bytes(2) <= room]
        for context, count in cells:
            if (context, count) not in fitting:
                self.report.notes.append(f"{count} sessions of {context} tokens do not fit into the device's memory.")
        return fitting

    def _tokens(self, context: int, count: int) -> int:
        """Tokens of the KV cache that a cell needs."""
        return count * (context + self.selection.new_tokens + _SPARE_TOKENS)

    def _cells(
        self, model: Path, head: Path, simulated: dict[str, Any] | None, cells: Sequence[tuple[int, int]],
        prompts: Mapping[int, Sequence[Sequence[int]]],
    ) -> Iterator[None]:  # fmt: skip
        flags = self._flags(model, head, cells)
        transports, start = self.selection.transports, time.monotonic()
        with contextlib.ExitStack() as stack:
            stack.enter_context(processes.services(self.folder, *flags, simulated, self.deadline - start))
            urls = {one: stack.enter_context(processes.gateway(self.folder, one)) for one in transports}
            since = time.time()
            processes.ask_once(urls[transports[0]], prompts[cells[0][0]][0])
            for recording in self.recordings:  # of an idle service: the target has captured its steps by then
                recording.next(since, _CAPTURE_SECONDS)
            self.report.notes.append(f"All processes were ready after {time.monotonic() - start:.0f} s.")
            for context, count in cells:
                for transport in transports:
                    if time.monotonic() > self.deadline:
                        cell = f"{transport}, {count} sessions of {context} tokens"
                        self.report.notes.append(f"{cell}: not measured, because the time was over (--seconds).")
                        continue
                    self._cell(urls[transport], transport, prompts[context][:count], context)
                    yield

    def _flags(
        self, model: Path, head: Path, cells: Sequence[tuple[int, int]]
    ) -> tuple[list[str], list[str]]:  # fmt: skip
        """Flags of the target and of the draft service."""
        tokens, most = max(self._tokens(*cell) for cell in cells), max(count for _, count in cells)
        both = ["--model-path", str(model), "--max-running-requests", str(most)]
        if self.selection.tree is not None:
            names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
            both += [word for pair in zip(names, map(str, self.selection.tree), strict=True) for word in pair]
        # Self-speculation is off, so that all draft tokens cross the streams. All features of cached prompts are kept.
        target = [*both, "--device", "cuda" if self.on_cuda else "cpu", "--max-total-tokens", str(tokens)]
        target += ["--self-speculation", "off", "--feature-cache-bytes", str(16 << 30)]
        if self.selection.always:
            target.append("--speculative-always")
        draft = [*both, "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)]
        draft += ["--draft-device", self.selection.draft_device if self.on_cuda else "cpu", "--require-draft"]
        return target, [*draft, "--draft-max-total-tokens", str(tokens)]

    def _cell(self, url: str, transport: str, prompts: Sequence[Sequence[int]], context: int) -> None:
        """Measure a cell: turns of all kinds, alternating."""
        chosen = self.selection
        kinds = [Kind(None)]
        kinds += [Kind(_REAL)] if chosen.head else [Kind(one, i) for i, one in enumerate(chosen.accept_lengths)]
        turns: dict[Kind, list[load.Turn]] = {kind: [] for kind in kinds}
        for number in range(chosen.rounds + 1):
            for kind in kinds[::-1] if (chosen.rounds - number) % 2 else kinds:  # last, one with a draft
                speculates = kind.accept_length is not None
                turn = load.generate(url, prompts, chosen.new_tokens, speculation=speculates, seed=kind.seed)
                if number:
                    turns[kind].append(turn)
        since = time.time() - (time.perf_counter() - turns[kinds[-1]][-1].end)
        rows = [recording.next(since) for recording in self.recordings]
        plain = load.median_rate(turns[kinds[0]])
        expected = turns[kinds[0]][0].texts
        for kind, own in turns.items():
            same = sum(a == b for turn in own for a, b in zip(turn.texts, expected, strict=True))
            row = self._row(kind, own, rows, plain) | {"same text": f"{same}/{len(own) * len(prompts)}"}
            self.report.add(transport=transport, context=context, sessions=len(prompts), **row)
        if self._draws:
            self._draw(turns[kinds[-1]][-1], rows)
            self._draws = False

    def _row(self, kind: Kind, turns: Sequence[load.Turn], rows: Sequence[Rows], plain: float) -> dict[str, Any]:
        """The figures of one kind's turns. plain: tokens/s of plain decoding."""
        rate = load.median_rate(turns)
        row: dict[str, Any] = {
            "asked": "plain" if kind.accept_length is None else kind.accept_length,
            "accept length": statistics.mean(turn.accept_length for turn in turns),
            "tokens/s": rate, "per TB/s": rate / (self.bandwidth / 1e12), "to plain": rate / plain,
        }  # fmt: skip
        found = [split.split_of(turn.start, turn.end, *rows, on_cuda=self.on_cuda) for turn in turns]
        splits = [one for one in found if one is not None]
        if not splits:
            return row
        for name, column in _COLUMNS.items():
            values = [value for one in splits if (value := getattr(one, name)) is not None]
            if values:
                row[column] = round(statistics.mean(values), 3)
        return row

    def _draw(self, turn: load.Turn, rows: Sequence[Rows]) -> None:
        """The timeline of some speculative steps of one session."""
        figure = new_figure(9, 3)
        split.draw(figure.subplots(), turn.start, turn.end, *rows)
        self.report.save(figure)


# Fields of a split and their columns.
_COLUMNS = {
    "period": "step ms", "target": "target device", "idle": "target idle", "target_host": "target host",
    "draft": "draft device", "draft_host": "draft host", "wire": "wire", "verified": "draft tokens",
}  # fmt: skip


def _notes(selection: Selection, bandwidth: float) -> list[str]:
    tree = selection.tree
    shape = "adaptive trees" if tree is None else f"trees of {tree[0]} steps, topk {tree[1]}, {tree[2]} tokens"
    notes = [
        f"Measured read bandwidth: {bandwidth / 1e9:,.0f} GB/s. {selection.new_tokens} new tokens, greedy; {shape}.",
        "tokens/s: of all sessions together, each from its first token to its last, as a client of the REST API "
        "receives them; median of the turns. per TB/s: over the bandwidth. to plain: over plain decoding's, in turns",
        "step ms: from step to step of the target, in the time in which all sessions generate. The target's device and "
        "its idle time add up to it; all other parts overlap with them. target host: its engine without waiting for "
        "the device. draft device and draft host: per step of the target; the former without the dispatch of its "
        "programs. wire: a commit's way to the draft and a proposal's way back, through the gateway",
        "draft tokens: verified per step, of all sessions together, filler included. same text: answers equal to plain "
        "decoding's",
    ]
    if selection.model is not None:
        return [*notes, f"{selection.model} with {selection.head}; acceptance is the head's own."]
    return [
        *notes,
        "Random weights in the shapes of Llama-3.1-8B and its EAGLE-3 head. asked: the simulated accept length. The "
        "drafter computes everything, then its candidates are replaced, by wrong tokens or by the known continuation, "
        "with probabilities by rank that give this length "
        f"{'with these trees' if tree else 'with the 15 best nodes of adaptive ones'} (bench/gpu/system/acceptance.py)",
    ]
