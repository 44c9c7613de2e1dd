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


def names(paths):
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_files_have_at_most_400_lines():
    assert len(SOURCES) > 100
    assert names(path for path in SOURCES if len(path.read_text().splitlines()) > MAX_LINES) == []


def test_folders_have_at_most_a_dozen_modules():
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    modules = Counter(path.parent for path in (*SOURCES, *tests) if not path.name.startswith("__"))
    assert names(folder for folder, count in modules.items() if count > MAX_MODULES) == []


def test_no_test_module_imports_another():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("tests.") and module.rpartition(".")[2].startswith(("test_", "conftest")):
                found.append(f"{path.relative_to(ROOT)}: {module}")
    assert found == []
