"""Run the campaign, and write a page with its results.

make chaos                                    each fault on each process, and some with a head as the drafter; minutes
make chaos ARGS="--all --minutes 30"          every temperature and number of sessions, too, as far as time allows
make chaos ARGS="--all --minutes 30 --resume" the cells that are missing in the page
make chaos ARGS="--only target SIGSTOP"       cells whose name has all of these words; no page is written
make chaos ARGS="pools"                       instead of one replica of each service, two: pools that change and break
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.harness import report
from bench.harness.errors import BenchError
from tests.chaos.campaign import Campaign
from tests.chaos.cells import Cell, all_cells, head_cells, selected
from tests.chaos.network import Network, network
from tests.chaos.page import Page
from tests.chaos.pools import app as pools
from tests.chaos.system import running_system
from tests.support.checkpoints.perfect import write_cyclic_target, write_perfect_eagle3
from tests.support.tiny import write_model, write_slower_twin, write_tokenizer

_WIDTH = 64000  # of the target's layers, most of it idle: slow enough for proposals to arrive in time
_DEEP_WIDTH = 16000  # of one with four times as many layers
_SHARPNESS = 0.25  # of a target whose head knows its text: sampled texts differ from the likeliest one
_CLONE_NEWNS = 0x00020000


@dataclass(frozen=True)
class Options:
    """Faults against a running system; all texts must be the undisturbed ones."""

    all: bool = False
    """Run every cell of the matrix. Default: each fault on each process once."""
    only: tuple[str, ...] = ()
    """Run only cells whose name contains each of these words. No page is written."""
    seed: int = 0
    """Of the selection, and of what the network loses and reorders."""
    seconds: float = 40.0
    """Length of SIGSTOP and network cut, in seconds. The gateway notices a peer that is silent for 30 s."""
    drafter: Literal["STANDALONE", "NGRAM", "EAGLE3"] | None = None
    """Drafter of the system. Default: STANDALONE, and a few cells with EAGLE3."""
    minutes: float = math.inf
    """Minutes after which no further cell begins."""
    resume: bool = False
    """Run only the cells that the page does not have yet, of the same commit, machine and settings."""
    log: str = "chaos.log"
    """File for the output of the system's processes."""
    output: str | None = None
    """Folder of the page. Default: docs/benchmarks."""


def main(options: Options) -> int:
    """Run the campaign. Returns 1 if anything was not as it should be, 2 if it could not run."""
    if os.geteuid():
        print("the campaign makes network namespaces and mounts file systems; run it as root", file=sys.stderr)
        return 2
    cells = [cell for cell in _cells(options) if all(word in cell.name for word in options.only)]
    if not cells:
        print(f"no cell has all of {', '.join(options.only)} in its name", file=sys.stderr)
        return 2
    report.set_folder(Path(options.output) if options.output else None)
    page = Page(cells, _command(options), seed=options.seed, seconds=options.seconds, kept=not options.only)
    try:
        missing = page.resume() if options.resume else cells
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _own_mounts()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="chaos-models-") as folder,
        network(options.seed) as emulated,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("writing the models", total=len(missing))
        until = time.monotonic() + 60 * options.minutes
        for drafter, of_drafter in itertools.groupby(missing, lambda cell: cell.drafter):
            run = _Run(options, emulated, until, page, lambda text: bar.update(task, description=text))
            flags = _flags(Path(folder), drafter)
            try:
                asyncio.run(run(flags, list(of_drafter), lambda: bar.advance(task)))
            except BenchError as error:
                print(f"the campaign ended: {error.message}; the system's output is in {options.log}", file=sys.stderr)
                return 1
    failed = [result for result in page.results if result.faults]
    for result in failed:
        print(f"{result.cell.name}: {'; '.join(result.faults)}", file=sys.stderr)
    left = len(cells) - len(page.rows)
    print(f"{len(page.results) - len(failed)} passed, {len(failed)} failed" + (f", {left} left" if left else ""))
    return 1 if failed else 0


def _cells(options: Options) -> list[Cell]:
    drafter = options.drafter or "STANDALONE"
    cells = all_cells(drafter) if options.all else selected(options.seed, drafter)
    return cells + head_cells() if options.drafter is None else cells


@dataclass(frozen=True)
class _Run:
    """Runs the cells of one system. until: no cell begins after this time; note: shows what is being done."""

    options: Options
    emulated: Network
    until: float
    page: Page
    note: Callable[[str], None]

    async def __call__(self, flags: list[str], cells: Sequence[Cell], done: Callable[[], None]) -> None:
        if time.monotonic() > self.until:
            return
        async with running_system(self.emulated, flags, Path(self.options.log), self.note) as system:
            campaign = Campaign(system, self.options.seconds, self.note)
            await campaign.prepare(cells)
            for cell in cells:
                if time.monotonic() > self.until:
                    return
                result = await campaign.run(cell)
                print(report.format_row(result.row() | {"took": result.seconds}), flush=True)
                self.page.add(result)
                done()


def _own_mounts() -> None:
    """File systems that are mounted from now on are this process's, and vanish with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace can be made")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _flags(folder: Path, drafter: str) -> list[str]:
    """Flags of `outrider serve`. The models of each drafter are in a folder of their own."""
    folder = folder / drafter
    if drafter == "EAGLE3":
        fast = write_tokenizer(write_cyclic_target(folder / "fast", sharpness=_SHARPNESS))
        target = write_tokenizer(write_slower_twin(folder / "target", fast, _DEEP_WIDTH))
        draft = write_perfect_eagle3(folder / "draft", target)
    else:
        draft = write_tokenizer(write_model(folder / "draft", seed=3))
        target = write_tokenizer(write_slower_twin(folder / "target", draft, _WIDTH))
    # An explicit tree: draft tokens are verified although they might not be profitable here.
    tree = ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5", "--speculative-eagle-topk", "1"]
    model = [] if drafter == "NGRAM" else ["--speculative-draft-model-path", str(draft)]
    own = ["--self-speculation", "off", "--max-running-requests", "64", "--max-total-tokens", "32768"]
    return ["--model-path", str(target), "--speculative-algorithm", drafter, *model, *tree, *own]


def _command(options: Options) -> str:
    """The command that repeats a campaign, without the places of its output."""
    flags = ["--all"] if options.all else []
    for name in ("seed", "seconds", "drafter"):
        value = getattr(options, name)
        if value not in (None, getattr(Options, name)):
            flags += [f"--{name}", str(value)]
    return "make chaos" + (f' ARGS="{" ".join(flags)}"' if flags else "")


if __name__ == "__main__":
    if sys.argv[1:2] == ["pools"]:
        sys.exit(pools.main(tyro.cli(pools.Options, args=sys.argv[2:], description=pools.__doc__)))
    sys.exit(main(tyro.cli(Options, description=__doc__)))
