"""What the doctor says of installed packages, from facts of machines that are not here."""

import compileall
import sys
import time

import pytest
from packaging.requirements import Requirement

from outrider.doctor import probes, software
from outrider.placement.devices import parse_gpus
from tests.support.gpu_machine import H100, L4, smi

HERE = parse_gpus(smi(H100))
CPU_BUILD = {"version": "2.13.0+cpu", "cuda": None, "available": False, "warnings": []}
TOO_OLD = {"version": "2.13.0", "cuda": "13.0", "available": False, "warnings": ["The driver is too old\nmore"]}
GOOD = {"version": "2.13.0", "cuda": "13.0", "available": True, "devices": ["H100"], "warnings": []}
ON_CPU = {"version": "0.10.2", "platform": "cpu", "devices": ["cpu"]}
ON_GPU = {"version": "0.10.2", "platform": "gpu", "devices": ["H100", "H100"]}


@pytest.mark.parametrize(
    ("facts", "cards", "wanted", "status", "text"),
    [
        (CPU_BUILD, [], True, "ok", "for the CPU"),
        (CPU_BUILD, [H100], True, "problem", "a build without CUDA): the target computes on the CPU"),
        (CPU_BUILD, [H100], False, "note", "unused GPU"),
        (TOO_OLD, [L4], True, "problem", "cannot use the GPU: The driver is too old"),
        (GOOD, [H100], True, "ok", "2.13.0 (CUDA 13.0), Triton 3.7.1, sees H100"),
        (GOOD | {"warnings": ["sm_120 is not supported"]}, [H100], True, "note", "warns: sm_120"),
        ({"error": "ImportError: libcudart.so"}, [H100], True, "problem", "libcudart"),
    ],
)
def test_pytorch(facts, cards, wanted, status, text):
    found = software.torch(facts, parse_gpus(smi(*cards)), wanted=wanted, find=lambda _: "3.7.1")
    assert (found.status, text in found.text) == (status, True), found
    assert status != "problem" or "make -B install" in found.remedy


@pytest.mark.parametrize(
    ("facts", "found", "tpus", "wanted", "versions", "status", "text"),
    [
        (ON_CPU, [], 0, False, {}, "ok", "0.10.2, sees 1 x cpu"),
        (ON_CPU, HERE, 0, False, {}, "note", "without a CUDA plugin: a draft model computes on the CPU"),
        (ON_CPU, HERE, 0, True, {}, "problem", "without a CUDA plugin"),
        (ON_CPU, HERE, 0, False, {"jax-cuda13-plugin": "0.10.2"}, "note", "without a working CUDA plugin"),
        (ON_GPU, HERE, 0, True, {"jax-cuda13-plugin": "0.10.2"}, "ok", "plugin for CUDA 13, sees 2 x H100"),
        (ON_GPU, HERE, 0, True, {"jax-cuda12-plugin": "0.10.1"}, "problem", "jax-cuda12-plugin 0.10.1 beside jaxlib"),
        (ON_CPU, [], 4, False, {}, "note", "without a TPU library"),
        ({"error": "no answer within 90 s"}, [], 0, False, {}, "problem", "no answer within 90 s"),
    ],
)
def test_jax(monkeypatch, facts, found, tpus, wanted, versions, status, text):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    find = ({"jaxlib": "0.10.2"} | versions).get
    result = software.jax(facts, found, tpus, wanted=wanted, find=find)
    assert (result.status, text in result.text) == (status, True), result


def test_a_variable_may_hide_jaxs_devices(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    found = software.jax(ON_CPU, HERE, 0, wanted=True, find={"jaxlib": "0.10.2"}.get)
    assert (found.status, found.remedy) == ("note", "unset JAX_PLATFORMS")


LINES = ['numpy<3,>=2.0', 'jax<0.12,>=0.10; extra == "draft"', 'torch<2.14,>=2.11; extra == "target"',
         'ruff; extra == "dev"', 'tokenizers>=0.22; extra == "target"']  # fmt: skip


def test_versions_are_compared_with_the_projects_ranges():
    needed = software.requirements(LINES)
    assert {part: [one.name for one in found] for part, found in needed.items()} == {
        "shared": ["numpy"], "gateway": [], "draft": ["jax"], "target": ["torch", "tokenizers"],
    }  # fmt: skip
    versions = {"numpy": "2.1", "jax": "0.12.1", "torch": "2.13.0+cpu"}
    found = {one.name: one for one in software.packages(needed, versions.get)}
    assert [found[name].status for name in ("shared", "draft", "target")] == ["ok", "note", "problem"]
    assert "untested: jax 0.12.1, tested with <0.12,>=0.10" in found["draft"].text
    assert (found["target"].text, "outrider[target]" in found["target"].remedy) == ("not installed: tokenizers", True)
    complete = {one.name: one for one in software.packages(needed, (versions | {"tokenizers": "0.23"}).get)}
    assert complete["target"].status == "ok"  # a local version, +cpu, is in the range


def test_this_installation_has_its_requirements():
    assert Requirement("numpy>=2.0,<3") in software.requirements()["shared"]
    assert {one.status for one in software.packages(software.requirements())} == {"ok"}


@pytest.mark.parametrize(
    ("facts", "compiler", "status", "text"),
    [
        ({"path": "/lib/x.so"}, True, "ok", "compiled: /lib/x.so"),
        ({"path": None}, True, "note", "the first start does so"),
        ({"path": None}, False, "note", "no C++ compiler"),
        ({"unavailable": "this processor lacks avx2"}, True, "note", "lacks avx2"),
        ({"error": "ModuleNotFoundError: No module named 'jax'"}, True, "note", "No module named 'jax'"),
    ],
)
def test_kernels(monkeypatch, facts, compiler, status, text):
    monkeypatch.setattr(software.shutil, "which", lambda _: "/usr/bin/g++" if compiler else None)
    (found,) = software.kernels({"target": facts})
    assert (found.status, text in found.text) == (status, True), found


def test_fp8_weights_need_their_library_on_a_gpu():
    assert list(software.torchao("fp8", on_gpu=False)) == list(software.torchao(None, on_gpu=True)) == []
    (missing,) = software.torchao("fp8", on_gpu=True, find=lambda _: None)
    (there,) = software.torchao("fp8", on_gpu=True, find=lambda _: "0.18.0")
    assert (missing.status, there.status) == ("problem", "ok")


def test_libraries_that_each_start_compiles_again_are_named(monkeypatch, tmp_path):
    package = tmp_path / "ponderous"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = ("ponderous", "not_there")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert software.bytecode(names).status == "note"
    assert "PYTHONDONTWRITEBYTECODE" in software.bytecode(names).text
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert software.bytecode(names).text == "ponderous: cached when first imported"
    compileall.compile_dir(package, quiet=1)
    assert software.bytecode(names).text == "ponderous cached"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import json; print('noise'); print(json.dumps({'a': 1}))", {"a": 1}),
        ("import nothing_of_that_name", {"error": "ModuleNotFoundError: No module named 'nothing_of_that_name'"}),
        ("print([1])", {"error": "it ended with code 0"}),
        ("import os; os.abort()", {"error": "it ended with code -6"}),
    ],
)
def test_a_child_answers_or_its_failure_is_the_answer(code, found):
    assert probes.ask(code) == found


def test_a_child_that_hangs_is_ended():
    start = time.monotonic()
    assert probes.ask("import time; time.sleep(60)", seconds=0.3) == {"error": "no answer within 0 s"}
    assert time.monotonic() - start < 30


def test_kernels_are_asked_for_without_compiling_them(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    found = probes.ask(probes.questions()["kernels of n-grams"])
    assert found.keys() == {"path"}
    assert not list(tmp_path.rglob("*.so"))
