"""The kernels are there on every processor that they are written for, and agree with their twins on each kind of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.native import vectors
from services.target.kernels.cpu import library

TARGET = Path(__file__).parent
KERNELS = tuple(f"test_{name}.py" for name in ("kernels", "linear", "draw", "screen", "eight_bits"))


def test_flags_are_those_of_the_kind():
    assert not any("avx512" in flag for flag in vectors.AVX2.flags)
    assert {"-mavx2", "-mavx512bf16", "-mavx512vnni"} <= set(vectors.AVX512.flags)
    assert vectors.AVX2.includes[1].name == "avx2"


@pytest.mark.skipif(bool(vectors.AVX2.missing()), reason="this processor has not even AVX2")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_kernels_can_be_had():
    assert library.available()


@pytest.mark.skipif(vectors.chosen() is not vectors.AVX512, reason="the kernels of AVX2 are tested already")
def test_a_processor_that_has_more_computes_as_an_older_one(tmp_path):
    """Their tests once more, compiled for AVX2."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *(str(TARGET / name) for name in KERNELS),
    ]
    run = subprocess.run(
        command, env={**os.environ, vectors.VARIABLE: vectors.AVX2.name}, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:]


def test_a_processor_without_them_is_told(monkeypatch):
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset({"sse2", "avx2"}))
    with pytest.raises(library.Unavailable, match="this processor lacks fma, f16c"):
        vectors.library("nothing", TARGET).compiled()
    monkeypatch.setattr(vectors, "_processor", frozenset)
    with pytest.raises(library.Unavailable, match="written for x86 processors"):
        vectors.library("nothing", TARGET).compiled()
