"""`make install` hands pip the packages of an accelerator; a script that notes its arguments stands for Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = (
    "Makefile", "pyproject.toml", "docker/requirements.py", "outrider/__init__.py", "outrider/placement/__init__.py",
    "outrider/placement/accelerators.py", "outrider/placement/devices.py",
)  # fmt: skip
PYTORCH = "https://packages.invalid/"


@pytest.fixture
def checkout(tmp_path):
    """What the installation reads, with an environment whose Python writes its arguments into `calls`."""
    for name in NEEDED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "index", "extras"),
    [
        (["ACCELERATOR=cpu"], None, []),
        (["ACCELERATOR=cpu", f"TORCH_INDEX={PYTORCH}cpu"], "cpu", []),
        (["ACCELERATOR=cuda13"], None, ["draft-cuda13", "target-cuda13"]),
        (["ACCELERATOR=cuda12", f"TORCH_INDEX={PYTORCH}cu126"], "cu126", ["draft-cuda12", "target-cuda12"]),
        (["ACCELERATOR=tpu"], None, ["draft-tpu"]),
    ],
)
def test_pip_gets_the_packages_of_an_accelerator(checkout, variables, index, extras):
    command = ["make", "--no-print-directory", ".venv/.packages", f"PYTHON={sys.executable}", *variables]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    assert "accelerators: " in result.stdout
    _, *torch, project = (checkout / "calls").read_text().splitlines()
    assert [call.partition("--index-url ")[2] for call in torch] == (
        [f"{PYTORCH}{index} torch>=2.11,<2.14"] if index else []
    )
    wanted = ["gateway", "draft", "train", "target", "bench", "otel", "dev", *extras]
    assert project.endswith(f"-e .[{','.join(wanted)}]")


def test_a_build_that_pip_does_not_find_by_itself_is_asked_for(checkout):
    command = ["make", ".venv/.packages", f"PYTHON={sys.executable}", "ACCELERATOR=cuda12"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert (result.returncode, "PyTorch's build cu126: name its package index" in result.stderr) == (2, True)
    assert "-e ." not in (checkout / "calls").read_text()


def test_an_accelerator_that_does_not_exist_installs_nothing(checkout):
    command = ["make", ".venv/.packages", f"PYTHON={sys.executable}", "ACCELERATOR=abacus"]
    result = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert (result.returncode, "invalid choice: 'abacus'" in result.stderr) == (2, True)
    assert "-e ." not in (checkout / "calls").read_text()
    assert not (checkout / ".venv" / ".packages").exists()
