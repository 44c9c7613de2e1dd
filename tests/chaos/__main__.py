"""Run the campaign, and write a page with its results.

make chaos                                    each fault on each process, some minutes
make chaos ARGS="--all"                       every temperature and number of sessions, too
make chaos ARGS="--only target SIGSTOP"       cells whose name has all of these words; no page is written
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.harness import report
from bench.harness.errors import BenchError
from tests.chaos.campaign import Campaign, Result
from tests.chaos.cells import Cell, all_cells, selected
from tests.chaos.network import Network, network
from tests.chaos.system import Levels, running_system
from tests.support.tiny import write_model, write_slower_twin, write_tokenizer

_WIDTH = 64000  # of the target's layers, most of it idle: slow enough for proposals to arrive in time
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
    drafter: Literal["STANDALONE", "NGRAM"] = "STANDALONE"
    """Drafter of the system."""
    log: str = "chaos.log"
    """File for the output of the system's processes."""
    output: str | None = None
    """Folder of the page. Default: docs/benchmarks."""


def main(options: Options) -> int:
    """Run the campaign. Returns 1 if anything was not as it should be."""
    if os.geteuid():
        print("the campaign makes network namespaces and mounts file systems; run it as root", file=sys.stderr)
        return 2
    cells = all_cells() if options.all else selected(options.seed)
    cells = [cell for cell in cells if all(word in cell.name for word in options.only)]
    if not cells:
        print(f"no cell has all of {', '.join(options.only)} in its name", file=sys.stderr)
        return 2
    _own_mounts()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="chaos-models-") as folder,
        network(options.seed) as emulated,
        Progress(*columns, console=Console(stderr=True)) as bar,
    ):
        task = bar.add_task("writing the models", total=len(cells))
        flags = _flags(Path(folder), options.drafter)

        def note(text: str) -> None:
            bar.update(task, description=text)

        try:
            results = asyncio.run(_run(options, emulated, flags, cells, note, lambda: bar.advance(task)))
        except BenchError as error:
            print(f"the campaign ended: {error.message}; the system's output is in {options.log}", file=sys.stderr)
            return 1
    if not options.only:
        _write(options, results)
    failed = [result for result in results if result.faults]
    for result in failed:
        print(f"{result.cell.name}: {'; '.join(result.faults)}", file=sys.stderr)
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


async def _run(
    options: Options, emulated: Network, flags: list[str], cells: Sequence[Cell], note, done
) -> list[Result]:
    results = []
    async with running_system(emulated, flags, Path(options.log), note) as system:
        campaign = Campaign(system, options.seconds, note)
        await campaign.prepare()
        for cell in cells:
            results.append(await campaign.run(cell))
            print(report.format_row(results[-1].row() | {"took": results[-1].seconds}), flush=True)
            done()
    return results


def _own_mounts() -> None:
    """File systems that are mounted from now on are this process's, and vanish with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "no mount namespace can be made")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def _flags(folder: Path, drafter: str) -> list[str]:
    draft = write_tokenizer(write_model(folder / "draft", seed=3))
    target = write_tokenizer(write_slower_twin(folder / "target", draft, _WIDTH))
    # An explicit tree: draft tokens are verified although they might not be profitable here.
    tree = ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5", "--speculative-eagle-topk", "1"]
    model = ["--speculative-draft-model-path", str(draft)] if drafter == "STANDALONE" else []
    own = ["--self-speculation", "off", "--max-running-requests", "64", "--max-total-tokens", "32768"]
    return ["--model-path", str(target), "--speculative-algorithm", drafter, *model, *tree, *own]


def _write(options: Options, results: Sequence[Result]) -> None:
    report.set_folder(Path(options.output) if options.output else None)
    failed = sum(bool(result.faults) for result in results)
    page = report.Report(
        "chaos",
        "Faults: texts and recovery",
        command=_command(options),
        notes=[
            f"{len(results)} cells, {failed} with a finding; seed {options.seed}, drafter {options.drafter}, a small "
            "random model as a target slowed down, its fast twin as the draft, two gateway workers",
            "The fault begins when a quarter of all tokens has arrived. Equal texts: those with the tokens of an "
            "undisturbed run that decoded plainly. Asked again: streams that ended with their gateway worker, which a "
            "client repeats; what they had was the beginning of the same text",
            f"SIGSTOP and network cut last {options.seconds:g} s. Half-open: the process is killed behind a cut of "
            "6 s; its peers see no end of their connections. Disk full: the process starts anew with an empty cache "
            "and no room. Clock step: an hour forwards, and back a second later. Slow reader: half of the clients do "
            "not read for 8 s, or the service's network takes 6 kB/s for as long",
            "Longest pause: of a stream between two tokens, from the fault on; of slow readers, the others. Whole "
            "again: seconds until all processes run and are connected, and a new request has its text with accepted "
            "draft tokens; from a kill, or from the end of a fault without one",
            "Levels: leased pages, open sessions, open files and resident memory of each process are what undisturbed "
            "loads leave, at most 45 s later",
            "The delay is each way. Delay, loss and reordering last until all streams have ended; a program in user "
            "space carries the packets between the processes' network namespaces",
        ],
    )
    page.rows = [result.row() for result in results]
    last = next((result.levels for result in reversed(results) if result.levels is not None), None)
    first = next((result.levels for result in results if result.levels is not None), None)
    if first is not None and last is not None:
        page.more = [("Levels after the first and the last cell", _level_rows(first, last))]
    page.write()


def _command(options: Options) -> str:
    """The command that repeats a campaign, without the places of its output."""
    flags = ["--all"] if options.all else []
    for name in ("seed", "seconds", "drafter"):
        value = getattr(options, name)
        if value != getattr(Options, name):
            flags += [f"--{name}", str(value)]
    return "make chaos" + (f' ARGS="{" ".join(flags)}"' if flags else "")


def _level_rows(first: Levels, last: Levels) -> list[dict[str, object]]:
    return [
        {
            "process": role, "memory first, MB": first.memory[role], "memory last, MB": last.memory[role],
            "open files first": first.files[role], "open files last": last.files[role],
        }
        for role in first.memory
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
