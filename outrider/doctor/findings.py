"""Findings of the doctor, and their output for people and programs."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "note", "problem"]

_WIDTH, _NAME = 120, 13
_INDENT = 12 + _NAME
_MARK = "-> "  # in front of what to do


@dataclass(frozen=True)
class Finding:
    """A fact about the machine or the system. topic: of a group. remedy: what to do, in the imperative.

    ok: as it should be; note: works, but perhaps not as expected; problem: something does not start or stays unused
    """

    topic: str
    name: str
    status: Status
    text: str
    remedy: str | None = None


def ok(topic: str, name: str, text: str) -> Finding:
    """A finding that needs nothing done."""
    return Finding(topic, name, "ok", text)


def note(topic: str, name: str, text: str, remedy: str | None = None) -> Finding:
    """A finding that may surprise."""
    return Finding(topic, name, "note", text, remedy)


def problem(topic: str, name: str, text: str, remedy: str | None = None) -> Finding:
    """A finding that must be mended. remedy: unless the text has it."""
    return Finding(topic, name, "problem", text, remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 if there is a problem, else 0."""
    return int(any(one.status == "problem" for one in findings))


def as_text(findings: list[Finding], command: str) -> str:
    """The findings by topic, in lines that fit a terminal. command: whose system they are about."""
    lines = [f"What `{command}` would run on here. Nothing is started or downloaded."]
    for topic in dict.fromkeys(one.topic for one in findings):
        lines += ["", topic]
        for one in findings:
            if one.topic == topic:
                lines += _lines(one)
    counts = {status: sum(one.status == status for one in findings) for status in ("problem", "note")}
    words = [f"{count} {name}{'' if count == 1 else 's'}" for name, count in counts.items() if count]
    return "\n".join([*lines, "", ", ".join(words) if words else "no problems"])


def _lines(finding: Finding) -> list[str]:
    width = max(60, min(_WIDTH, shutil.get_terminal_size((_WIDTH, 0)).columns))
    head = f"  {finding.status:<8} {finding.name:<{_NAME}} "
    parts = [(head.ljust(_INDENT), finding.text)]
    if finding.remedy:
        parts.append((" " * _INDENT + _MARK, finding.remedy))
    lines: list[str] = []
    for first, text in parts:
        later = " " * (len(first) if _MARK in first else _INDENT)
        lines += textwrap.wrap(
            text, width, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
        )
    return lines


def as_json(findings: list[Finding], command: str) -> str:
    """The findings as an object."""
    rows = [
        {"topic": one.topic, "name": one.name, "status": one.status, "text": one.text, "remedy": one.remedy}
        for one in findings
    ]
    return json.dumps({"command": command, "problems": exit_code(findings) == 1, "findings": rows}, indent=2)
