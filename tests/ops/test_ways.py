"""The ways of a request, a proposal and a commit: few files, which ARCHITECTURE.md names in the life of a request."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.target.kernels.cpu import library
from tests.support.system.ways import POINTS, files_of, returns_of
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.skipif(not library.available(), reason="a request's way ends at a compiled kernel")

ROOT = Path(__file__).parents[2]
MAX_FILES = {"request": 15, "proposal": 15, "commit": 12}


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("model")))
    command = [sys.executable, "-m", "tests.support.system.ways", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", POINTS)
def test_a_way_has_few_files_all_of_which_the_life_of_a_request_names(ways, name):
    life = (ROOT / "ARCHITECTURE.md").read_text().partition("## The life of a request\n")[2].partition("\n## ")[0]
    files = files_of(ways[name])
    assert len(files) <= MAX_FILES[name], files
    assert [file for file in files if f"`{file}`" not in life] == []


def test_no_way_turns_back(ways):
    """The one exception is ASGI's: what is sent goes through the middleware that called the app."""
    turns = {place for way in ways.values() for place in returns_of(way)}
    assert {place for place in turns if not place.startswith("gateway/api/middleware.py")} == set()
