"""Results of a benchmark: a JSON file, a Markdown page and a plot, each with its recipe, hardware and commit."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CHECKOUT = Path(__file__).parents[2]
_chosen: Path | None = None


def write_into(folder: Path) -> None:
    """Let this process's reports go to a folder, which is made. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    global _chosen  # noqa: PLW0603 - set once, by the entry point
    _chosen = folder


def chosen() -> Path | None:
    """The folder that was chosen for reports, if one was."""
    return _chosen


def results() -> Path:
    """Where reports go: the folder that was chosen, docs/benchmarks of a checkout, or ./benchmarks."""
    pages = _CHECKOUT / "docs" / "benchmarks"
    return _chosen or (pages if pages.is_dir() else Path("benchmarks"))


def command() -> str:
    """How this process was called, as a stranger would type it; without secrets."""
    arguments = [
        "..." if before in ("--api-key", "--header") else re.sub(r"^(--api-key|--header)=.*", r"\1=...", word)
        for before, word in zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    ]
    return "outrider bench " + shlex.join(arguments[1:] if arguments[:1] == ["bench"] else arguments)


def hardware() -> dict[str, Any]:
    """What the figures were taken on."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 2**20), "gpu": _gpu()}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _gpu() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str:
    """The commit of the code that was measured, "+changes" if the tree differs from it; elsewhere the version."""
    if not (_CHECKOUT / ".git").exists():
        return f"of version {__version__}"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if dirty else "")


def earlier_rows(name: str, same: Callable[[list[str]], bool]) -> list[dict[str, Any]]:
    """The rows of the last report of a name, to go on with; none if its notes are not the same in what matters.

    Raises ValueError if other code took them, or another machine: a page names one commit and one machine.
    """
    file = results() / f"{name}.json"
    content = json.loads(file.read_text()) if file.exists() else {"notes": [], "rows": []}
    if not same(content["notes"]) or not content["rows"]:
        return []
    for fact, now in (("commit", commit()), ("hardware", hardware())):
        if content[fact] != now:
            raise ValueError(f"--resume: the rows of {file} are of {fact} {content[fact]}, not of {now}; measure anew")
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def recipe() -> dict[str, Any]:
    """What a figure needs beside it so that others can take it again."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"command": command(), "commit": commit(), "date": date, "hardware": hardware()}


@dataclass
class Report:
    """A benchmark's result under way; `write` and `save` put it into the folder of results."""

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)  # further tables, with titles
    _drawn: bool = field(default=False, init=False)  # or a picture that lies in the folder is an earlier one's

    def add(self, **row: Any) -> None:
        """Add a row and print it."""
        self.rows.append(row)
        print(line_of({name: row[name] for name in self.columns or row if name in row}), flush=True)

    def save(self, figure: Figure) -> None:
        """Write NAME.png, which the page then shows."""
        results().mkdir(parents=True, exist_ok=True)
        figure.savefig(results() / f"{self.name}.png", dpi=130)
        self._drawn = True

    def write(self) -> None:
        """Write NAME.json and NAME.md."""
        facts, folder = recipe(), results()
        folder.mkdir(parents=True, exist_ok=True)
        content = {"title": self.title, **facts, "notes": self.notes, "rows": self.rows}
        if self.more:
            content["more"] = dict(self.more)
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self._markdown(facts, self._drawn))

    def _markdown(self, facts: dict[str, Any], plot: bool) -> str:
        machine = facts["hardware"]
        where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB"
        where += f", {machine['gpu']}" if machine["gpu"] else ""
        lines = [
            f"# {self.title}",
            "",
            f"`{facts['command']}`, commit {facts['commit']}, {facts['date']}; {where}",
            "",
            *_table(self.rows, self.columns),
            "",
            *(f"- {note}" for note in self.notes),
        ]
        for title, rows in self.more:
            lines += ["", f"## {title}", "", *_table(rows)]
        if plot:
            lines += ["", f"![{self.title}]({self.name}.png)"]
        return "\n".join(lines) + "\n"


def line_of(row: dict[str, Any]) -> str:
    """A row for a terminal."""
    return "  ".join(f"{key}={_text(value)}" for key, value in row.items())


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    return [
        "| " + " | ".join(map(_cell, columns)) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(_cell(_text(row.get(c, ""))) for c in columns) + " |" for row in rows),
    ]


def _cell(text: str) -> str:
    """A text within a table of Markdown, in which it must not end its cell."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
