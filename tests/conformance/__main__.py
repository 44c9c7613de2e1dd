"""Run the clients, and write a page with their results.

make conformance                              the default model, all clients
make conformance ARGS="--only openai llm"     some of them; the page is then left as it is
make conformance ARGS="--url http://..."      against a running system

OPENAI_DESCRIPTION=openapi.yaml, OpenAI's own description of its API, makes schemathesis use it, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from bench.serve.outrider_system import served
from outrider import __version__
from outrider.checkpoints import checkpoint
from tests.conformance.environments import CLIENTS, FOLDER, ROOT, SCRIPTS, Client

PAGE = ROOT / "docs" / "conformance.md"


@dataclass(frozen=True)
class Options:
    """Run clients of other projects against a running system."""

    url: str | None = None
    """Base URL of a running system, without /v1. Default: start one."""
    model_path: str = "default"
    """Model of the started system; clients use its tokenizer."""
    only: tuple[str, ...] = ()
    """Clients to run. Default: all."""
    seconds: float = 600.0
    """Maximum duration of a client, in seconds."""
    page: str | None = None
    """Page that is written. Default: docs/conformance.md if all clients run, else none."""


@dataclass
class Outcome:
    """Results of a client: names of passed checks with their findings, and of failed checks with the reason.

    skipped: reason if the client was not run; empty otherwise
    """

    client: Client
    skipped: str = ""
    version: str = "-"
    passed: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        """The results in a few words."""
        if self.skipped:
            return f"skipped: {self.skipped}"
        return f"{len(self.passed)} passed, {len(self.failed)} failed"


def run(client: Client, url: str, model_folder: Path, seconds: float) -> Outcome:
    """Run a client. Errors of the client are failed checks; a missing program skips the client."""
    outcome = Outcome(client)
    if client.lacking:
        outcome.skipped = f"there is no {client.lacking} on this machine"
        return outcome
    try:
        client.install()
        outcome.version = client.version()
    except subprocess.CalledProcessError as error:
        outcome.failed.append(("installation", str(error)))
        return outcome
    start = time.monotonic()
    work = FOLDER / "work" / client.name
    work.mkdir(parents=True, exist_ok=True)
    results = work / "results.jsonl"
    results.unlink(missing_ok=True)
    settings = {"URL": url, "MODEL_FOLDER": str(model_folder), "RESULTS": str(results), "BIN": str(client.commands)}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    command = [client.interpreter, str(SCRIPTS / client.script)]
    try:
        ended = subprocess.run(command, cwd=work, env=environment, timeout=seconds, capture_output=True, text=True)
        if ended.returncode:
            outcome.failed.append(("the script", (ended.stderr.strip().splitlines() or ["ended"])[-1]))
    except subprocess.TimeoutExpired:
        outcome.failed.append(("the script", f"was not done in {seconds:.0f} s"))
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        (outcome.passed if row["ok"] else outcome.failed).append((row["check"], row["found"]))
    outcome.seconds = time.monotonic() - start
    return outcome


@contextlib.contextmanager
def system(options: Options) -> Iterator[str]:
    """Base URL of the system."""
    if options.url is not None:
        yield options.url.rstrip("/")
        return
    with served(options.model_path, ["--request-timeout", "60"], "auto") as url:
        yield url


def page(outcomes: Sequence[Outcome], model: str) -> str:
    """The page with all results, as Markdown."""
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    rows = [
        f"| {o.client.name} | {o.version} | {len(o.passed)} of {len(o.passed) + len(o.failed)} | {o.seconds:.0f} s |"
        for o in ran
    ]
    rows += [f"| {o.client.name} | - | {o.summary()} | - |" for o in outcomes if o.skipped]
    parts = [
        "# Clients of other projects",
        "",
        f"`make conformance` wrote this page: Outrider {__version__} with {model}, Python {platform.python_version()}.",
        "Each client has an environment of its own, created on demand in `build/conformance`.",
        "",
        "| client | version | checks passed | took |",
        "|---|---|---|---|",
        *rows,
    ]
    for outcome in ran:
        parts += ["", f"## {outcome.client.name} {outcome.version}", ""]
        parts += [f"- {name}: {found}" if found else f"- {name}" for name, found in outcome.passed]
        parts += [f"- **failed** {name}: {found}" for name, found in outcome.failed]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str]) -> int:
    """Run the clients. Returns 0 if every check passed, else 1."""
    options = tyro.cli(Options, args=argv, prog="make conformance")
    unknown = set(options.only) - {client.name for client in CLIENTS}
    if unknown:
        print(f"there is no client {', '.join(sorted(unknown))}; choose of {', '.join(c.name for c in CLIENTS)}")
        return 2
    chosen = [client for client in CLIENTS if not options.only or client.name in options.only]
    folder, outcomes = checkpoint.resolve(options.model_path), []
    with system(options) as url:
        for client in chosen:
            outcome = run(client, url, folder, options.seconds)
            outcomes.append(outcome)
            print(f"{client.name} {outcome.version}: {outcome.summary()}")
            for name, found in outcome.failed:
                print(f"  FAILED {name}: {found}")
    where = options.page or (str(PAGE) if len(chosen) == len(CLIENTS) else None)
    if where is not None:
        Path(where).write_text(page(outcomes, checkpoint.display_name(options.model_path)))
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
