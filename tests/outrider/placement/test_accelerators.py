"""Which packages an installation needs, from facts of machines that are not here."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outrider.placement import accelerators
from outrider.placement.accelerators import choose, environment, explanation, main, named
from outrider.placement.devices import parse_gpus
from tests.support.gpu_machine import H100, L4, OLD, RTX, V100, put_gpus, smi, take_gpus

ROOT = Path(__file__).parents[3]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize(
    ("cards", "others", "accelerator", "build", "reason"),
    [
        ([], {}, "cpu", None, "neither NVIDIA GPU nor TPU"),
        ([H100], {}, "cuda13", None, "driver 580.65.06: CUDA 13"),
        ([H100, H100], {"tpus": 4}, "cuda13", None, "H100"),
        ([L4], {}, "cuda12", "cu126", "CUDA 13 needs driver 580"),
        ([H100, L4], {}, "cuda12", "cu126", "driver 550.54.15"),
        ([RTX], {}, "cuda12", "cu128", "CUDA 13 needs driver 580"),
        ([V100], {}, "cuda12", "cu126", "compute capability 7.5"),
        ([OLD], {}, "cpu", None, "runs neither CUDA 12 nor 13"),
        ([], {"tpus": 4}, "tpu", None, "4 TPU chips"),
        ([], {"bare_gpus": 2}, "cpu", None, "without a driver that works (2 on the PCI bus)"),
    ],
)
def test_packages_follow_driver_and_devices(cards, others, accelerator, build, reason):
    choice = choose(parse_gpus(smi(*cards)), **others)
    assert choice.accelerator == accelerator
    assert choice.torch_build == build
    assert reason in explanation(choice)
    line = {"cpu": "# ", "tpu": "ACCELERATOR=tpu"}.get(accelerator, f"ACCELERATOR_GPU={accelerator}")
    assert environment(choice).startswith(line)


def test_extras_are_those_of_the_project_and_a_cpu_needs_none():
    for accelerator, names in accelerators.EXTRAS.items():
        assert set(names) <= EXTRAS.keys()
        assert (accelerator == "cpu") == (names == ())
    ranges = {one.name: one.specifier for one in map(Requirement, EXTRAS["draft"])}
    for name in ("draft-cuda12", "draft-cuda13", "draft-tpu"):  # a plugin with another version than JAX does not load
        (plugin,) = map(Requirement, EXTRAS[name])
        assert (plugin.name, plugin.specifier) == ("jax", ranges["jax"])


def test_a_hidden_gpu_counts_for_the_installation(monkeypatch, tmp_path, capsys):
    put_gpus(monkeypatch, tmp_path, L4, visible="")
    main(["extras"])
    main(["torch-build"])
    assert capsys.readouterr().out.split() == [",draft-cuda12,target-cuda12", "cu126"]
    main(["env"])
    assert capsys.readouterr().out == (
        "ACCELERATOR_GPU=cuda12\n# the address of the package index of PyTorch's build cu126:\nTORCH_INDEX_GPU=\n"
    )
    take_gpus(monkeypatch, tmp_path)
    main(["extras"])
    main(["torch-build"])
    assert capsys.readouterr().out == "\n\n"


def test_an_accelerator_may_be_named_for_another_machine():
    assert named("cuda12", []).torch_build == "cu126"
    assert named("cuda12", parse_gpus(smi(RTX))).torch_build == "cu128"
    assert named("cpu", parse_gpus(smi(H100))).extras == ()


def test_the_choice_needs_nothing_but_python():
    code = (
        "import sys; sys.path.insert(0, '.'); import outrider.placement.accelerators as a; "
        "sys.exit(a.main(['explain', '--accelerator', 'cuda13']))"
    )
    result = subprocess.run([sys.executable, "-ISc", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "JAX's plugin for CUDA 13, torchao, PyTorch for CUDA 13" in result.stdout


@pytest.mark.parametrize(
    ("extra", "accelerator", "found", "missing"),
    [
        ("draft", "cuda13", "jax[cuda13]", "torchao"),
        ("target", "cuda12", "torchao", "jax"),
        ("draft", "cpu", "jax>=", "jax["),
        ("target", "tpu", "torch>=", "jax"),
        ("gateway", "cuda13", "fastapi", "jax"),
    ],
)
def test_images_get_the_packages_of_their_accelerator(extra, accelerator, found, missing):
    script = [sys.executable, str(ROOT / "docker" / "requirements.py"), "--accelerator", accelerator, extra, "otel"]
    with (ROOT / "pyproject.toml").open("rb") as project:
        lines = subprocess.run(script, stdin=project, capture_output=True, text=True, check=True).stdout.splitlines()
    assert any(line.startswith(found) for line in lines)
    assert not any(line.startswith(missing) for line in lines)
    # The Makefile and the target's image choose the build of PyTorch by this line.
    assert sum(line.startswith(("torch<", "torch>")) for line in lines) == (extra == "target")
