"""The kernels are there on every processor that they are written for, and agree with their twins on each kind of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from outrider import native
from outrider.errors import ConfigError
from outrider.native import vectors
from services.target.kernels.cpu import library

TARGET = Path(__file__).parent
KERNELS = (
    "test_kernels.py", "../model/test_linear.py", "test_block_formats.py", "test_cpu_sampling.py",
    "test_pruned_head.py", "test_fp8_cache.py",
)  # fmt: skip


def test_flags_are_those_of_the_kind():
    assert not any("avx512" in flag for flag in vectors.AVX2.flags)
    assert {"-mavx2", "-mavx512bf16", "-mavx512vnni"} <= set(vectors.AVX512.flags)
    assert vectors.AVX2.includes[1].name == "avx2"


@pytest.mark.skipif(bool(vectors.AVX2.missing()), reason="this processor has not even AVX2")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_kernels_can_be_had():
    assert library.available()


@pytest.mark.skipif(vectors.chosen() is not vectors.AVX512, reason="the kernels of AVX2 are tested already")
@pytest.mark.timeout(900)
def test_a_processor_that_has_more_computes_as_an_older_one():
    """Their tests once more, compiled for AVX2."""
    files = [str(TARGET / name) for name in KERNELS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    older = {**os.environ, vectors.VARIABLE: vectors.AVX2.name}
    run = subprocess.run(command, env=older, capture_output=True, text=True, timeout=800, check=False)
    assert run.returncode == 0, run.stdout[-2000:]


def test_missing_instructions_are_reported(monkeypatch):
    monkeypatch.delenv(vectors.VARIABLE, raising=False)  # a named kind raises ConfigError instead
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset({"sse2", "avx2"}))
    with pytest.raises(library.Unavailable, match="this processor lacks fma, f16c"):
        vectors.library("nothing", TARGET).compiled()
    monkeypatch.setattr(vectors, "_processor", frozenset)
    with pytest.raises(library.Unavailable, match="written for x86 processors"):
        vectors.library("nothing", TARGET).compiled()


@pytest.mark.parametrize(
    ("named", "message"),
    [("sse2", "OUTRIDER_VECTORS is sse2, but there are kernels for avx2 and avx512"),
     ("avx512", "OUTRIDER_VECTORS is avx512, but this processor lacks avx512f")],
)  # fmt: skip
def test_a_kind_that_cannot_be_had_is_refused_where_it_is_named(named, message, monkeypatch):
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset(vectors.AVX2.instructions))
    monkeypatch.setenv(vectors.VARIABLE, named)
    vectors.chosen.cache_clear()
    try:
        with pytest.raises(ConfigError, match=message):
            vectors.library("nothing", TARGET).compiled()
    finally:
        vectors.chosen.cache_clear()


@pytest.mark.parametrize("kind", vectors.KINDS.values(), ids=list(vectors.KINDS))
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_products_ask_for_the_weights_that_come_next(kind, tmp_path):
    """In machine code, which compilers once left it out of: they took it for something without effect."""
    source, machine = tmp_path / "dots.cpp", tmp_path / "dots.s"
    use = "void multiply(int rows, outrider::Pass pass) { outrider::kDots[rows](pass); }"
    source.write_text(f'#include "linear.h"\n#include "multiply_blocks.h"\n{use}\n')
    folders = [f"-I{folder}" for folder in kind.includes]
    subprocess.run(["g++", *kind.flags, *folders, "-S", "-o", machine, source], check=True, timeout=100)
    name = r"_ZN8outrider\d+((?:run|tile)_(?:plain|int8|int4|blocks)(?:_of_few|_of_many)?)I\w+"
    parts = re.split(rf"^{name}:$", machine.read_text(), flags=re.M)
    products = list(zip(parts[1::2], parts[2::2], strict=True))
    assert {"plain", "int8", "int4", "blocks"} == {function.split("_")[1] for function, _ in products}
    assert all("prefetcht0" in code and "prefetcht1" in code for _, code in products)


def test_headers_of_all_kinds_are_installed():
    root = TARGET.parents[2]
    reported = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "outrider.native"
    ]
    folder = root / "outrider" / "native"
    installed = {path for pattern in reported for path in folder.glob(pattern) if path.is_file()}
    assert set(folder.rglob("*.h")) <= installed
    kinds = [{path.name for path in folder.glob(f"include/{name}/*.h")} for name in vectors.KINDS]
    assert kinds[0] == kinds[1] != set()  # of one name in both


def test_kernels_for_other_machines_are_compiled_by_the_name_of_their_kind(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(native.Library, "compiled", lambda library: made.append(library) or Path("kernels.so"))
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(sys, "argv", ["build", "avx512", "avx2"])
    vectors.report(library.build.kernels, "Kernels", "PyTorch")
    assert [one.includes[-1].name for one in made] == ["avx512", "avx2"]
    assert all(one.check is None for one in made)  # this machine need not be able to run them
    assert capsys.readouterr().out.startswith("Kernels (avx512): compiled, kernels.so\nKernels (avx2): compiled")
    monkeypatch.setattr(sys, "argv", ["build", "neon"])
    with pytest.raises(SystemExit, match="neon: there are kernels for avx2 and avx512"):
        vectors.report(library.build.kernels, "Kernels", "PyTorch")
