"""Reports of a benchmark: a JSON file, a Markdown page and a plot, with command, commit, date and hardware."""

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
_folder: Path | None = None


def set_folder(folder: Path | None) -> None:
    """Write the reports of this process into a folder, which is created; None restores the default. Raises OSError."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    global _folder  # noqa: PLW0603 - set once, by the entry point
    _folder = folder


def chosen_folder() -> Path | None:
    """The folder given to `set_folder`, if any."""
    return _folder


def results_folder() -> Path:
    """The folder of reports: the one given to `set_folder`, else docs/benchmarks of a checkout, else ./benchmarks."""
    pages = _CHECKOUT / "docs" / "benchmarks"
    return _folder or (pages if pages.is_dir() else Path("benchmarks"))


def command() -> str:
    """The command line of this process, as a user types it, without secrets."""
    arguments = [
        "..." if before in ("--api-key", "--header") else re.sub(r"^(--api-key|--header)=.*", r"\1=...", word)
        for before, word in zip(["", *sys.argv[1:]], sys.argv[1:], strict=False)
    ]
    return "outrider bench " + shlex.join(arguments[1:] if arguments[:1] == ["bench"] else arguments)


def hardware() -> dict[str, Any]:
    """CPU model, usable cores, memory in GB, and GPU name or None."""
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
    """The measured commit, with "+changes" if the tree differs from it; outside a checkout the version."""
    if not (_CHECKOUT / ".git").exists():
        return f"of version {__version__}"

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    dirty = git("status", "--porcelain", "--untracked-files=no", "--", ":!docs")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if dirty else "")


def rows_to_resume(name: str, same: Callable[[list[str]], bool]) -> list[dict[str, Any]]:
    """The rows of the last report of this name, for --resume; none if `same` rejects its notes.

    Raises ValueError if their commit or hardware differs from the present: a page has one commit and one machine.
    """
    file = results_folder() / f"{name}.json"
    content = json.loads(file.read_text()) if file.exists() else {"notes": [], "rows": []}
    if not same(content["notes"]) or not content["rows"]:
        return []
    for fact, now in (("commit", commit()), ("hardware", hardware())):
        if content[fact] != now:
            raise ValueError(f"--resume: the rows of {file} are of {fact} {content[fact]}, not of {now}; omit --resume")
    rows: list[dict[str, Any]] = content["rows"]
    return rows


def recipe(given: str = "") -> dict[str, Any]:
    """Command, commit, date and hardware: what is needed to reproduce a figure. given: a command other than a bench."""
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"command": given or command(), "commit": commit(), "date": date, "hardware": hardware()}


def new_figure(width: float, height: float) -> Figure:
    """An empty plot; its size in inches. It needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@dataclass
class Report:
    """The result of a benchmark in progress; `write` and `save` write it into the folder of reports.

    more: further tables with their titles. command: that made it, if it is no benchmark
    """

    name: str
    title: str
    notes: list[str] = field(default_factory=list)
    columns: Sequence[str] = ()
    rows: list[dict[str, Any]] = field(default_factory=list)
    more: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    command: str = ""
    _has_plot: bool = field(default=False, init=False)  # a picture already in the folder may be of an earlier run

    def add(self, **row: Any) -> None:
        """Add a row and print it."""
        self.rows.append(row)
        print(format_row({name: row[name] for name in self.columns or row if name in row}), flush=True)

    def save(self, figure: Figure) -> None:
        """Write NAME.png and include it in the page."""
        results_folder().mkdir(parents=True, exist_ok=True)
        figure.savefig(results_folder() / f"{self.name}.png", dpi=130)
        self._has_plot = True

    def write(self) -> None:
        """Write NAME.json and NAME.md."""
        facts, folder = recipe(self.command), results_folder()
        folder.mkdir(parents=True, exist_ok=True)
        content = {"title": self.title, **facts, "notes": self.notes, "rows": self.rows}
        if self.more:
            content["more"] = dict(self.more)
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{self.name}.md").write_text(self._markdown(facts, self._has_plot))

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


def format_row(row: dict[str, Any]) -> str:
    """A row as one line of text, for the terminal."""
    return "  ".join(f"{key}={_text(value)}" for key, value in row.items())


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> list[str]:
    columns = columns or list(dict.fromkeys(key for row in rows for key in row))
    return [
        "| " + " | ".join(map(_cell, columns)) + " |",
        "|" + " --- |" * len(columns),
        *("| " + " | ".join(_cell(_text(row.get(c, ""))) for c in columns) + " |" for row in rows),
    ]


def _cell(text: str) -> str:
    """A text with line breaks and pipes escaped, for a cell of a Markdown table."""
    return " ".join(text.split("\n")).replace("|", "\\|")


def _text(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value)
