"""The command line of the campaign with pools, and its page.

make chaos ARGS="pools"            all scenes; minutes
make chaos ARGS="pools --tiny"     some scenes, with engines that take time only; no page
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.harness import report
from bench.harness.errors import BenchError
from tests.chaos.emulator import Rule
from tests.chaos.network import network
from tests.chaos.pools.campaign import Campaign, Result, run_all
from tests.chaos.pools.scenes import scenes
from tests.chaos.pools.system import NODES, Services, running_system
from tests.support.tiny import write_model, write_slower_twin, write_tokenizer

_WIDTH = 16000  # of the target's layers, most of it idle
_DELAY, _LOSS = 0.003, 0.002  # of each host's packets, each way


@dataclass(frozen=True)
class Options:
    """Pools that change and break under load, each process on a host of its own; all texts must be the same."""

    seed: int = 0
    """Of what the network loses, and of which replicas are hit."""
    seconds: float = 20.0
    """Length of a partition, in seconds. The gateway notices a peer that has not acknowledged its bytes for 10 s, and
    one that is silent for 30 s."""
    sessions: int = 8
    """Concurrent sessions."""
    tokens: int = 160
    """Tokens of an answer."""
    tiny: bool = False
    """Some scenes, with engines that take time only. No page is written."""
    log: str = "chaos-pools.log"
    """File for the output of the system's processes."""
    output: str | None = None
    """Folder of the page. Default: docs/benchmarks."""


def main(options: Options) -> int:
    """Run the campaign. Returns 1 if anything was not as it should be, 2 if it could not run."""
    if os.geteuid():
        print("the campaign makes network namespaces; run it as root", file=sys.stderr)
        return 2
    report.set_folder(Path(options.output) if options.output else None)
    page = report.Report("chaos-pools", "Pools that change and break under load", command=_command(options))
    page.notes = _notes(options)
    Path(options.log).write_bytes(b"")
    with tempfile.TemporaryDirectory(prefix="chaos-models-") as folder, network(options.seed, NODES) as emulated:
        services = _simulated() if options.tiny else _services(Path(folder))
        normal = {node: Rule(delay=_DELAY, loss=_LOSS) for node in NODES if node != "client"}

        def add(result: Result) -> None:
            page.add(**result.row())
            if not options.tiny:
                page.write()

        async def run() -> list[Result]:
            async with running_system(emulated, services, normal, Path(options.log)) as system:
                campaign = Campaign(system, options.sessions, options.tokens, options.seconds)
                return await run_all(campaign, scenes(options.seed, few=options.tiny), add)

        try:
            results = asyncio.run(run())
        except BenchError as error:
            print(f"the campaign ended: {error.message}; the system's output is in {options.log}", file=sys.stderr)
            return 1
    failed = [result for result in results if result.faults]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _services(folder: Path) -> Services:
    draft = write_tokenizer(write_model(folder / "draft", seed=3))
    target = write_tokenizer(write_slower_twin(folder / "target", draft, _WIDTH))
    # An explicit tree: draft tokens are verified although they might not be profitable here.
    tree = ["--speculative-num-steps", "4", "--speculative-num-draft-tokens", "5", "--speculative-eagle-topk", "1"]
    common = ["--max-running-requests", "32", "--log-level", "warning", *tree]
    verifier = ["--model-path", str(target), "--self-speculation", "off", "--max-total-tokens", "16384"]
    drafter = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft)]
    drafter += ["--draft-max-total-tokens", "16384"]
    return Services(["target", *verifier, *common], ["draft", *drafter, *common])


def _simulated() -> Services:
    engines = "bench.pools.engines"
    return Services([engines, "target", "20", "4", "0"], [engines, "draft", "4", "4", "0"], simulated=True)


def _command(options: Options) -> str:
    """The command that repeats a campaign, without the places of its output."""
    flags = ["pools"]
    for name in ("seed", "seconds", "sessions", "tokens"):
        value = getattr(options, name)
        if value != getattr(Options, name):
            flags += [f"--{name}", str(value)]
    return f'make chaos ARGS="{" ".join(flags)}"'


def _notes(options: Options) -> list[str]:
    return [
        f"Seed {options.seed}. A gateway, two targets and two drafts, each with a network namespace; {1e3 * _DELAY:g} "
        f"ms each way and {_LOSS:.1%} loss at each host, so twice that between two. A small random model as a target "
        "slowed down, its fast twin as the draft",
        f"{options.sessions} clients send one request of {options.tokens} tokens after the other, at temperatures 0 "
        "and 0.8, until the scene is over. Equal texts: those with the tokens of a run that decoded plainly while "
        "nothing happened",
        "Killed: the processes start again a second later. Drained: removed by the API. Partitioned: cut off for "
        f"{options.seconds:g} s, briefly for 8 s; bytes that are not acknowledged for 10 s end a stream. Sessions "
        "moved: opened again, on a target or a draft",
        "Longest pause: of a stream between two tokens, from the event on. Noticed: until the gateway shows that a "
        "replica is not in use, or has left. Whole again: until the replicas have sessions and draft tokens are "
        "accepted; from the start of the processes, the addition, or the end of the partition",
        "Left behind: open sessions, leased pages and running requests, at most 60 s after the load",
    ]
