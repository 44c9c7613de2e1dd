"""The documents name what there is: every file of the packages, every flag, and nothing else."""

import re
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

from outrider.config import DraftConfig, GatewayConfig, ServeConfig, TargetConfig, TrainConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "gateway", "services")
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
OF_OTHERS = {
    "--build", "--drafter", "--help", "--ignore", "--profile",  # of Docker, of benchmarks, of every program
    "--http2-prior-knowledge", "--list-methods", "--policy", "--protocol", "--worker-urls",  # of buf and smg
}  # fmt: skip


def files():
    found = [path for package in PACKAGES for path in (ROOT / package).rglob("*")]
    kinds = [path for path in found if path.suffix in (".py", ".h", ".cpp") and "v1" not in path.parts]
    return {path.relative_to(ROOT) for path in kinds if not path.name.startswith("__")}


def named():
    """(folder, name or pattern) of every file that the tree of ARCHITECTURE.md names."""
    lines = (ROOT / "ARCHITECTURE.md").read_text().partition("## The tree\n")[2].splitlines()
    places: list[tuple[int, Path]] = [(0, Path())]
    for line in filter(str.strip, lines):
        indent = len(line) - len(line.lstrip())
        first = line.split()[0]
        if indent < 20:  # else it goes on with the line before
            while places[-1][0] >= indent and len(places) > 1:
                places.pop()
        if first.endswith("/") and indent < 20:
            places.append((indent, places[-1][1] / first))
        for name in re.findall(r"[\w*/]+\.(?:py|h|cpp)\b", line):
            yield places[-1][1], name


def test_the_tree_names_every_file_and_no_other():
    there = files()
    told = set()
    for folder, name in named():
        if folder.parts[:1] and folder.parts[0] in PACKAGES:
            fits = {path for path in there if path.is_relative_to(folder) and fnmatch(str(path), f"*/{name}")}
            assert fits, f"there is no {folder / name}"
            told |= fits
    assert there - told == set()


def flags_of(*configs):
    names = [field.name for config in configs for field in fields(config) if isinstance(field.type, str)]
    return {"--" + name.replace("_", "-") for name in names}


def test_operations_names_every_flag():
    text = (ROOT / "docs" / "operations.md").read_text()
    told = set(re.findall(r"--[a-z][a-z0-9-]*[a-z0-9*]", text))
    processes = flags_of(TargetConfig, DraftConfig, GatewayConfig)
    missing = {flag for flag in processes if not any(fnmatch(flag, pattern) for pattern in told)}
    assert missing == set()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_and_files_that_are_named_exist(path):
    text = path.read_text()
    known = flags_of(TargetConfig, DraftConfig, GatewayConfig, ServeConfig, TrainConfig) | OF_OTHERS
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9*]", text):
        assert any(fnmatch(name, flag) for name in known), flag
    for name in re.findall(r"(?:outrider|gateway|services|docs|tests|protos|docker|bench)/[\w/.*]*[\w*/]", text):
        assert list(ROOT.glob(name + "*")), name
