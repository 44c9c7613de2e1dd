"""The documents are true to the repository: packages, files, flags, links, and the figures of the README."""

import ast
import importlib.util
import json
import re
import tomllib
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest

from outrider.config import DoctorOptions, DraftConfig, GatewayConfig, ServeConfig, TargetConfig, TrainConfig

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "gateway", "services", "bench")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
]
PATHS = re.compile(r"(?<![\w./])(?:outrider|gateway|services|docs|tests|protos|docker|bench)/[\w/.*-]*[\w*/]")
LINKED = [*DOCUMENTS, ROOT / "docs" / "benchmarks" / "README.md", *(ROOT / "docs" / "benchmarks").glob("[er]*.md")]
OF_OTHERS = {
    "--create-namespace", "--namespace", "--set",  # Helm
    "--build", "--drafter", "--help", "--help-all", "--ignore", "--old",
    "--only", "--profile", "--scale",  # Docker, bench, any
    "--self-draft", "--self-draft-head",  # earlier spellings of --self-speculation
    "--sglang",  # slime's prefix
    "--http2-prior-knowledge", "--list-methods", "--policy", "--protocol", "--worker-urls",  # buf and smg
    "--unix-socket",  # curl
    "--no-deps",  # pip
    "--generate", "--head",  # Ray
    "--offload-rollout", "--rollout-external-engine-addrs", "--rollout-num-gpus-per-engine", "--rollout-top-p",  # slime
    "--sglang-speculative-*", "--update-weight-disk-dir", "--update-weight-mode", "--update-weight-transport",
    "--use-rollout-routing-replay",
}  # fmt: skip


def packages():
    """Every package, by its path from the root."""
    found = (path.parent for name in PACKAGES for path in (ROOT / name).rglob("__init__.py"))
    return sorted(str(path.relative_to(ROOT)) for path in found)


def mapped():
    """The paths that begin the lines of ARCHITECTURE.md's map."""
    lines = ARCHITECTURE.partition("## The map\n")[2].splitlines()
    return [line.split()[0] for line in lines if line.startswith("    ")]


def test_the_map_has_one_line_for_every_package():
    lines = mapped()
    assert len(lines) == len(set(lines))
    assert [line for line in lines if not (ROOT / line).is_dir()] == []
    assert set(packages()) - set(lines) == set()


@pytest.mark.parametrize("package", packages())
def test_every_package_has_a_docstring(package):
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))


def test_the_floors_are_those_of_the_import_contracts():
    drawn = " ".join(ARCHITECTURE.split())
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = [one for one in tools["importlinter"]["contracts"] if one["type"] == "layers"]
    assert contracts
    for contract in contracts:
        floors = " > ".join(layer.replace(" | ", ", ") for layer in contract["layers"])
        assert f"{contract['containers'][0]} {floors} " in drawn, contract["name"]


def flags_of(*configs):
    names = [field.name for config in configs for field in fields(config) if isinstance(field.type, str)]
    return {"--" + name.replace("_", "-") for name in names}


def written(name):
    """A generated page, and what its generator would write now."""
    spec = importlib.util.spec_from_file_location(f"generate_{name}", ROOT / "docs" / f"generate_{name}.py")
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    return generator.PAGE.read_text(), generator.page()


def test_the_page_of_memory_is_what_the_plan_says():
    page, now = written("memory")
    assert page == now, "run make memory"


def test_the_page_of_flags_is_what_make_flags_writes():
    page, now = written("flags")
    assert page == now, "run make flags"
    configs = (TargetConfig, DraftConfig, GatewayConfig, ServeConfig, TrainConfig)
    assert {flag for flag in flags_of(*configs) if f"`{flag}`" not in page} <= {"--shared", "--gateway"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_flags_and_files_that_are_named_exist(path):
    text = path.read_text()
    configs = (TargetConfig, DraftConfig, GatewayConfig, ServeConfig, TrainConfig, DoctorOptions)
    known = flags_of(*configs) | OF_OTHERS | aliases()
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9*]", text):
        assert any(fnmatch(name, flag) for name in known), flag
    for name in PATHS.findall(text):
        assert list(ROOT.glob(name + "*")), name


def aliases():
    """Other spellings of flags, from the page that is generated of them."""
    return set(re.findall(r"`(--[a-z0-9-]+)`", (ROOT / "docs" / "flags.md").read_text()))


@pytest.mark.parametrize("path", LINKED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_lead_to_files_and_headings_that_exist(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        place = (path.parent / name) if name else path
        assert place.exists(), target
        if heading:
            titles = re.findall(r"^#+ (.+)$", place.read_text(), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}, target


def test_every_document_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert path.name == "README.md" or f"({path.name})" in index, path.name


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name)
def test_a_decision_says_context_decision_measurement_and_price_on_one_screen(path):
    text = path.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Measured", "Price"]
    assert len(text.splitlines()) <= 70
    assert f"({path.name})" in (path.parent / "README.md").read_text()


def test_decisions_that_code_refers_to_exist():
    names = {path.name for path in DECISIONS}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"docs/decisions/([\w-]+\.md)", path.read_text()):
                assert name in names, f"{path.relative_to(ROOT)}: {name}"


def figures():
    """The rows of the README's table of figures."""
    lines = [
        line.strip().strip("|").split("|") for line in (ROOT / "README.md").read_text().splitlines() if "|" in line
    ]
    lines = [[cell.strip() for cell in line] for line in lines]
    start = next(i for i, line in enumerate(lines) if line[0] == "two cores of")
    return lines[start + 2 : start + 6]


WIDTHS = {"bfloat16": ("bf16", "bf16"), "int8": ("int8", "q8_0"), "int4": ("int4", "q4_0")}
CONCURRENCY = {"one request": 1, "eight requests": 8}


@pytest.mark.parametrize("row", figures(), ids=lambda row: row[0])
def test_figures_of_the_readme_are_those_of_their_pages(row):
    (page,) = re.findall(r"\((docs/benchmarks/[\w-]+)\.md\)", row[0])
    width, load = row[1].split(", ")
    rows = json.loads((ROOT / f"{page}.json").read_text())["rows"]
    if "peers" not in page and "gguf" not in page:
        at_zero = [one for one in rows if one["temperature"] == 0 and one["concurrency"] == CONCURRENCY[load]]
        (found,) = (one for one in at_zero if one["setting"] == "AUTO")
        figures = [
            f"{found['plain_tokens_per_s']:.0f}",
            f"{found['tokens_per_s']:.0f}",
            f"{found['ratio']:.2f}",
            "",
            "",
        ]
        assert row[2:] == figures
        return
    assert load == "one request"
    rates = {one["peer"]: f"{one['tokens/s']:.0f}" for one in rows}
    ratios = {one["ours"]: one for one in json.loads((ROOT / f"{page}-ratios.json").read_text())["rows"]}
    if "gguf" in page:  # both sides on one file
        plain, ours, peer, _ = rates
    else:
        own, others = WIDTHS[width]
        plain, ours, peer = f"outrider {own}", f"outrider {own}, AUTO", f"llama.cpp {others}"
    speedups = [ratios[ours][name].split()[0] for name in (plain, peer)]
    assert row[2:] == [rates[plain], rates[ours], speedups[0], rates[peer], speedups[1]]
