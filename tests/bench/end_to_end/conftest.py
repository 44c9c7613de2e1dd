"""A simulated server in place of `outrider serve`, and a file of prompts."""

import contextlib
import json
from pathlib import Path

import pytest

from bench.end_to_end import accept, online
from tests.support.bench.server import in_a_thread


@pytest.fixture
def prompts(report_folder, monkeypatch):
    """A file of prompts, in the folder of reports."""

    @contextlib.contextmanager
    def served(model, flags, dtype):
        with in_a_thread() as url:
            yield url

    for module in (accept, online):
        monkeypatch.setattr(module, "served", served)
        monkeypatch.setattr(module, "resolve", Path)
    file = report_folder / "prompts.jsonl"
    rows = [{"category": c, "turns": ["first", "second"]} for c in ("a", "a", "b", "b")]
    file.write_text("\n".join(map(json.dumps, rows)))
    return file
