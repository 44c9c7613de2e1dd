"""The documents name what there is: every file of the packages, every flag, and nothing else."""

import json
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
    "--help-all", "--self-draft", "--self-draft-head",  # of every process; earlier spellings of --self-speculation
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


OF_PEERS = {  # columns of the README's table beside those of a page; {}: how many bits weights have
    "llama.cpp, as wide": {"bf16": "llama.cpp bf16", "int8": "llama.cpp q8_0", "int4": "llama.cpp q4_0"},
    "llama.cpp Q4_0": "llama.cpp q4_0", "vLLM bfloat16": "vLLM bf16", "itself, no drafts": "outrider {}",
    "OpenVINO int8, eight at once": "OpenVINO int8, 8", "itself, eight at once": "outrider {}, 8",
}  # fmt: skip


def test_what_the_readme_says_of_peers_is_what_pages_say():
    lines = [line.strip("| ").split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if "|" in line]
    start = next(i for i, line in enumerate(lines) if line[1:2] == ["weights"])
    names, rows = lines[start], lines[start + 2 :]
    assert set(names[2:]) == set(OF_PEERS)
    assert len(rows) == 9
    for row in rows:
        (page,) = re.findall(r"\(([\w/-]+)\.md\)", row[0])
        width = {"bfloat16": "bf16"}.get(row[1], row[1])
        ratios = {ratio["ours"]: ratio for ratio in json.loads((ROOT / f"{page}.json").read_text())["rows"]}
        for name, value in zip(names[2:], row[2:], strict=True):
            column = OF_PEERS[name]
            column = column[width] if isinstance(column, dict) else column.format(width)
            assert ratios[f"outrider {width}, AUTO"].get(column, "-").split()[0] == value, (row[:2], name)
