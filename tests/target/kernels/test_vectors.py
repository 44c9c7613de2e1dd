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
from tests.support.emulated import kernels as emulation
from tests.support.emulated import less_optimized, plugin

TARGET = Path(__file__).parent
KERNELS = (
    "test_kernels.py", "../model/test_linear.py", "test_block_formats.py", "test_cpu_sampling.py",
    "test_pruned_head.py", "test_fp8_cache.py",
)  # fmt: skip
# What depends on the instruction set: each kernel with each format and the shapes at its edges. Whole texts, sizes of
# real models and random parameters add nothing to what the kernels' own tests compare.
SELECTION = """
    not text and not real_size and not any_parameters and not dense
    and not (broken_node and not native-trees-9)
    and not (compiled_kernel_agrees and not (heads0 or heads1 or heads3 or heads5))
    and not (same_bits and not (heads0 or heads4))
    and not (those_of_all_logits and not 96-1001)
"""


def test_flags_are_those_of_the_kind():
    assert not any("avx512" in flag for flag in vectors.AVX2.flags)
    assert {"-mavx2", "-mavx512bf16", "-mavx512vnni"} <= set(vectors.AVX512.flags)
    assert [folder.name for folder in vectors.AVX2.includes] == ["include", "x86", "avx2"]
    assert "-march=armv8.2-a+dotprod+i8mm+bf16" in vectors.NEON_BF16.flags
    assert [folder.name for folder in vectors.NEON.includes] == ["include", "neon"]
    assert all(("-mtune=native" in kind.flags) == kind.family.here for kind in vectors.KINDS.values())


@pytest.mark.parametrize(
    ("architecture", "features", "chosen"),
    [
        ("x86_64", vectors.AVX2.instructions, vectors.AVX2),
        ("x86_64", vectors.AVX512.instructions, vectors.AVX512),
        ("aarch64", ("fp", "asimd", "asimddp"), vectors.NEON),
        ("aarch64", ("asimd", "asimddp", "bf16"), vectors.NEON),
        ("aarch64", ("asimd", "asimddp", "i8mm", "bf16"), vectors.NEON_BF16),
        ("aarch64", ("asimd",), vectors.NEON),  # the baseline, whose missing instructions are reported
        ("riscv64", (), vectors.AVX2),
    ],
)
def test_the_best_kind_of_the_architecture_is_chosen(architecture, features, chosen, monkeypatch):
    monkeypatch.delenv(vectors.VARIABLE, raising=False)
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset(features))
    monkeypatch.setattr(vectors.platform, "machine", lambda: architecture)
    assert vectors.chosen.__wrapped__() is chosen


def test_instruction_sets_are_read_on_both_architectures():
    assert vectors.instruction_sets("processor\t: 0\nflags\t\t: fpu avx2\nflags\t\t: fpu\n") == ["fpu", "avx2"]
    assert vectors.instruction_sets("BogoMIPS\t: 243.75\nFeatures\t: fp asimd\n") == ["fp", "asimd"]
    assert vectors.instruction_sets("") == []


@pytest.mark.skipif(bool(vectors.AVX2.missing()), reason="this processor has not even AVX2")
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_kernels_can_be_had():
    assert library.available()


@pytest.mark.long
@pytest.mark.skipif(vectors.chosen() is not vectors.AVX512, reason="the kernels of AVX2 are tested already")
@pytest.mark.timeout(900)
def test_a_processor_that_has_more_computes_as_an_older_one():
    """Some of their tests once more, compiled for AVX2."""
    files = [str(TARGET / name) for name in KERNELS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", less_optimized.__name__]
    command += ["-k", " ".join(SELECTION.split()), *files]
    older = {**os.environ, vectors.VARIABLE: vectors.AVX2.name}
    run = subprocess.run(command, env=older, capture_output=True, text=True, timeout=800, check=False)
    assert run.returncode == 0, run.stdout[-2000:]
    assert int(run.stdout.rpartition(" passed")[0].split()[-1]) > 100


def test_missing_instructions_are_reported(monkeypatch):
    monkeypatch.delenv(vectors.VARIABLE, raising=False)  # a named kind raises ConfigError instead
    monkeypatch.setattr(vectors, "chosen", lambda: vectors.AVX2)
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset({"sse2", "avx2"}))
    with pytest.raises(library.Unavailable, match="this processor lacks fma, f16c"):
        vectors.library("nothing", TARGET).compiled()
    monkeypatch.setattr(vectors, "_processor", frozenset)
    with pytest.raises(library.Unavailable, match="written for x86 and ARM processors"):
        vectors.library("nothing", TARGET).compiled()


@pytest.mark.parametrize(
    ("named", "message"),
    [("sse2", "OUTRIDER_VECTORS is sse2, but there are kernels for avx2, avx512, neon and neon_bf16"),
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [one for one in vectors.KINDS.values() if one.family.here], ids=lambda kind: kind.name)
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")
def test_products_ask_for_the_weights_that_come_next(kind, tmp_path):
    """In machine code, which compilers once left it out of: they took it for something without effect."""
    source, machine = tmp_path / "dots.cpp", tmp_path / "dots.s"
    use = "void multiply(int rows, outrider::Pass pass) { outrider::kDots[rows](pass); }"
    # Of each kind of block format one, for few or many rows: all of them take most of a minute.
    blocks = "".join(
        f"template void outrider::multiply_blocks<outrider::Format::{name}, {rows}>(const outrider::Pass&);\n"
        for name, rows in (("kSymmetric8", 1), ("kK4", 6), ("kK6", 1))
    )  # fmt: skip
    blocks += "template void outrider::multiply_float8<1>(const outrider::Pass&);\n"
    headers = "".join(f'#include "{name}.h"\n' for name in ("products/linear", "block_dots", "float8_dots"))
    source.write_text(f"{headers}{blocks}{use}\n")
    folders = [f"-I{folder}" for folder in kind.includes]
    subprocess.run(["g++", *kind.flags, *folders, "-S", "-o", machine, source], check=True, timeout=100)
    name = r"_ZN8outrider\d+((?:run|tile)_(?:plain|int8|int4|blocks|pairs|float8)(?:_of_few|_of_many)?)I\w+"
    parts = re.split(rf"^{name}:$", machine.read_text(), flags=re.M)
    products = list(zip(parts[1::2], parts[2::2], strict=True))
    assert {"plain", "int8", "int4", "blocks", "float8"} <= {function.split("_")[1] for function, _ in products}
    near, far = ("pldl1keep", "pldl2keep") if kind.folder == "neon" else ("prefetcht0", "prefetcht1")
    assert all(near in code and far in code for _, code in products)


def test_headers_of_all_kinds_are_installed():
    root = TARGET.parents[2]
    reported = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "outrider.native"
    ]
    folder = root / "outrider" / "native"
    installed = {path for pattern in reported for path in folder.glob(pattern) if path.is_file()}
    assert set(folder.rglob("*.h")) <= installed
    kinds = [{path.name for part in kind.includes[1:] for path in part.glob("*.h")} for kind in vectors.KINDS.values()]
    assert all(one == kinds[0] != set() for one in kinds)  # of one name in all


def test_kernels_for_other_machines_are_compiled_by_the_name_of_their_kind(monkeypatch, capsys):
    made = []
    monkeypatch.setattr(native.Library, "compiled", lambda library: made.append(library) or Path("kernels.so"))
    monkeypatch.setattr(vectors, "_processor", lambda: frozenset({"sse2"}))
    monkeypatch.setattr(sys, "argv", ["build", "avx512", "avx2"])
    vectors.report(library.build.kernels, "Kernels", "PyTorch")
    assert [one.includes[-1].name for one in made] == ["avx512", "avx2"]
    assert all(one.check is None for one in made)  # this machine need not be able to run them
    assert capsys.readouterr().out.startswith("Kernels (avx512): compiled, kernels.so\nKernels (avx2): compiled")
    made.clear()
    monkeypatch.setattr(vectors.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(sys, "argv", ["build", "all"])
    vectors.report(library.build.kernels, "Kernels", "PyTorch")
    assert [one.flags for one in made] == [vectors.NEON.flags, vectors.NEON_BF16.flags]
    monkeypatch.setattr(sys, "argv", ["build", "sve"])
    with pytest.raises(SystemExit, match="sve: there are kernels for avx2, avx512, neon and neon_bf16; all is this"):
        vectors.report(library.build.kernels, "Kernels", "PyTorch")


@pytest.mark.skipif(bool(emulation.lacking()), reason=f"no ARM kernels: {emulation.lacking()}")
@pytest.mark.timeout(300)
def test_products_attention_and_sampling_of_arm_agree_with_their_twins():
    """Some of their tests once more, cross-compiled, under an emulator; `make arm` runs all, with and without bf16."""
    files = [str(TARGET / name) for name in ("../model/test_linear.py", "test_kernels.py", "test_cpu_sampling.py")]
    some = "test_linear or (compiled_kernel_agrees and heads1) or several_rows or not_finite"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.support.emulated.plugin"]
    arm = {**os.environ, plugin.VARIABLE: f"{vectors.NEON_BF16.name}/operators"}
    run = subprocess.run(
        [*command, "-k", some, *files], env=arm, capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:]
    assert int(run.stdout.rpartition(" passed")[0].split()[-1]) > 30
