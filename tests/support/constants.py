"""Policy constants: numbers in modules and classes that were set by hand, rather than by a format or a standard.

A test changes each of them, and what it measures must change: a number without effect has no reason to be there.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# By constant, "module:NAME" or "module:Class.name": what changes with it.
Effects = Mapping[str, Callable[[], object]]


def constant_tests(
    effects: Mapping[str, Effects], fixed: Mapping[str, Mapping[str, str]] | None = None, whole: Collection[str] = ()
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Two tests of the constants of some packages: each has an effect; all are tested and explained.

    effects: by package. fixed: by package and constant, why it has to be as it is. whole: packages all of whose modules
    are tested; of the others it is those that `effects` names
    """
    fixed = fixed or {}

    @pytest.mark.parametrize(("package", "constant"), [(one, key) for one, keys in effects.items() for key in keys])
    def test_effect(package: str, constant: str) -> None:
        check_effect(package, constant, effects[package][constant])

    @pytest.mark.parametrize("package", effects)
    def test_complete(package: str) -> None:
        modules = () if package in whole else sorted({key.partition(":")[0] for key in effects[package]})
        check_complete(package, *modules, effects=effects[package], fixed=fixed.get(package, {}))

    return test_effect, test_complete


def constants_of(package: str, *modules: str) -> dict[str, ast.stmt]:
    """The numbers that modules of a package assign, by "module:NAME". modules: all of the folder by default."""
    folder = ROOT / package.replace(".", "/")
    found = {}
    for module in modules or sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__"):
        tree = ast.parse((folder / f"{module}.py").read_text())
        for owner, name, statement in _assignments(tree):
            if (name.isupper() and owner is None) or (owner is not None and name.islower()):
                key = f"{module}:{name}" if owner is None else f"{module}:{owner}.{name}"
                if _is_number(_value(package, key)):
                    found[key] = statement
    return found


def _assignments(tree: ast.Module) -> Iterator[tuple[str | None, str, ast.stmt]]:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for owner, body in [(None, tree.body), *((node.name, node.body) for node in classes)]:
        for statement in body:
            for target in statement.targets if isinstance(statement, ast.Assign) else ():
                for one in target.elts if isinstance(target, ast.Tuple) else (target,):
                    if isinstance(one, ast.Name):
                        yield owner, one.id, statement


def _value(package: str, key: str) -> Any:
    owner, name = _owner(package, key)
    return getattr(owner, name, None)


def _owner(package: str, key: str) -> tuple[Any, str]:
    """What holds a constant, and its name there."""
    module, _, path = key.partition(":")
    owner: Any = importlib.import_module(f"{package}.{module}")
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    return owner, name


def _is_number(value: object) -> bool:
    """True for numbers, and for sequences of them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool | Enum)


def variants(value: Any) -> list[Any]:
    """A constant halved and doubled. Of a share or a factor near 1 it is the difference from 1 that changes."""
    if isinstance(value, list | tuple):
        return [type(value)(both) for both in zip(*map(variants, value), strict=True)]
    if isinstance(value, int):
        return [value // 2, 2 * value]
    if 0.5 < value < 1.0 or 1.0 < value < 2.0:
        return [1.0 + 2.0 * (value - 1.0), 1.0 + (value - 1.0) / 2.0]
    return [value / 2.0, 2.0 * value]


@contextmanager
def changed(package: str, key: str, value: object) -> Iterator[None]:
    """A constant has another value, in its module and in those that import it."""
    owner, name = _owner(package, key)
    old, root = getattr(owner, name), package.partition(".")[0]
    owners = [owner]
    if not name.startswith("_") and ":" in key and "." not in key.partition(":")[2]:
        loaded = [module for one, module in sys.modules.items() if one.partition(".")[0] == root]
        owners += [module for module in loaded if module is not owner and getattr(module, name, None) is old]
    for one in owners:
        setattr(one, name, value)
    try:
        yield
    finally:
        for one in owners:
            setattr(one, name, old)


def check_effect(package: str, key: str, measure: Callable[[], object]) -> None:
    """What is measured is the same twice, and another with each variant of the constant."""
    usual = measure()
    assert measure() == usual, "the measurement depends on chance"
    for value in variants(_value(package, key)):
        with changed(package, key, value):
            assert measure() != usual, f"{key} = {value} changes nothing"


def check_complete(package: str, *modules: str, effects: Effects, fixed: Mapping[str, str]) -> None:
    """All constants have an effect, or are fixed for a reason; and a comment says their unit and reason."""
    found = constants_of(package, *modules)
    assert sorted(found) == sorted([*effects, *fixed])
    assert [key for key, statement in found.items() if not _is_explained(package, key, statement)] == []


def _is_explained(package: str, key: str, statement: ast.stmt) -> bool:
    """True if a comment stands behind the statement or above it, or a docstring below."""
    lines = (ROOT / package.replace(".", "/") / f"{key.partition(':')[0]}.py").read_text().splitlines()
    above, last, below = (
        lines[statement.lineno - 2],
        lines[(statement.end_lineno or 0) - 1],
        lines[statement.end_lineno or 0],
    )
    return above.lstrip().startswith("#") or "#" in last or below.lstrip().startswith('"""')
