"""The rules of CONTRIBUTING.md that a program can check: sizes of files and folders, and what tests import."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("outrider", "gateway", "services", "bench")
SOURCES = [
    path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*"))
    if path.suffix in (".py", ".h", ".cpp", ".js", ".css") and "outrider/wire/v1" not in path.as_posix()
]
MAX_LINES, MAX_MODULES = 400, 12
MAX_ATTRIBUTES, MAX_METHODS = 15, 20
# Classes beyond these limits, with the reason.
LARGE_CLASSES = {
    "TargetServicer": "a method for each call of the service, as gRPC wants them",
    "ModelDrafter": "the verbs of a drafter, and what the drafters with a model share of them and override",
    "FeatureDrafter": "the same of the drafters that read the target's hidden states",
    "SpeculationTree": "the operations on a tree, each of which keeps its arrays in line",
    "ModelRunner": "a model's weights, pools and programs, which one call to the device takes together",
    "PreparedSpans": "an array each for what one transfer brings to the device and what a launch leaves there",
    "Child": "a child's flags, which are most of it, and the state of its process",
    "ServiceMetrics": "an attribute for each metric",
}


def names(paths):
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_files_have_at_most_400_lines():
    assert len(SOURCES) > 100
    assert names(path for path in SOURCES if len(path.read_text().splitlines()) > MAX_LINES) == []


def test_folders_have_at_most_a_dozen_modules():
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    modules = Counter(path.parent for path in (*SOURCES, *tests) if not path.name.startswith("__"))
    assert names(folder for folder, count in modules.items() if count > MAX_MODULES) == []


def test_test_files_have_at_most_400_lines():
    tests = list((ROOT / "tests").rglob("*.py"))
    assert names(path for path in tests if len(path.read_text().splitlines()) > MAX_LINES) == []


def size_of(node):
    """Attributes and methods of a class. Those of a record, which its annotations declare, are not counted."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    stored = {
        item.attr
        for item in ast.walk(node)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
        if isinstance(item.value, ast.Name) and item.value.id == "self"
    }
    declared = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return len(stored | declared) if stored else 0, len(methods)


def test_classes_have_at_most_15_attributes_and_20_methods():
    large = {}
    for path in SOURCES:
        if path.suffix != ".py" or path.is_relative_to(ROOT / "bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                attributes, methods = size_of(node)
                if attributes > MAX_ATTRIBUTES or methods > MAX_METHODS:
                    large[node.name] = f"{path.relative_to(ROOT)}: {attributes} attributes, {methods} methods"
    assert {name: size for name, size in large.items() if name not in LARGE_CLASSES} == {}
    assert LARGE_CLASSES.keys() <= large.keys(), "these are small enough by now"


def test_no_test_module_imports_another():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("tests.") and module.rpartition(".")[2].startswith(("test_", "conftest")):
                found.append(f"{path.relative_to(ROOT)}: {module}")
    assert found == []
