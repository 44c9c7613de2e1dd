"""Questions to libraries, in child processes: importing them takes seconds, and they would reserve devices here.

A child prints one JSON object. One that fails, hangs or prints something else yields an `error` in place of facts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from outrider.process.python_command import python_command

Facts = dict[str, Any]

SECONDS = 90.0
"""Time limit of a child: a busy machine takes most of a minute to import PyTorch for the first time."""

TORCH = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    found = {"version": torch.__version__, "cuda": torch.version.cuda, "available": torch.cuda.is_available()}
    if found["available"]:
        found["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        found["architectures"] = torch.cuda.get_arch_list()
print(json.dumps(found | {"warnings": [str(one.message) for one in caught]}))
"""
JAX = """
import json, jax
devices = jax.devices()
print(json.dumps({"version": jax.__version__, "platform": devices[0].platform, "devices": [
    one.device_kind for one in devices]}))
"""
# Whether kernels are compiled; asking does not compile them.
_KERNELS = """
import json
from outrider.native import Unavailable
from {module} import {name} as library
found = {{}}
try:
    path = library.found()
    found["path"] = path and str(path)
except Unavailable as reason:
    found["unavailable"] = str(reason)
print(json.dumps(found))
"""
KERNELS = {
    "target": ("services.target.kernels.cpu", "services.target.kernels.cpu.build", "KERNELS"),
    "draft": ("services.draft.kernels.cpu", "services.draft.kernels.cpu.build", "KERNELS"),
    "n-grams": ("services.draft.ngrams.compiled", "services.draft.ngrams.compiled", "LIBRARY"),
}
"""Modules that compile kernels when they are run, and where their library is."""


def questions() -> dict[str, str]:
    """The code of each child, by name."""
    kernels = {
        f"kernels of {part}": _KERNELS.format(module=module, name=name) for part, (_, module, name) in KERNELS.items()
    }
    return {"torch": TORCH, "jax": JAX} | kernels


def ask_all(code: Mapping[str, str], seconds: float = SECONDS) -> dict[str, Facts]:
    """The answers of all children, two at a time, because each keeps a core busy."""
    with ThreadPoolExecutor(2) as threads:
        return dict(zip(code, threads.map(lambda one: ask(one, seconds), code.values()), strict=True))


def ask(code: str, seconds: float = SECONDS) -> Facts:
    """What a child's code prints. Facts without the child's answer have an `error`."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        result = subprocess.run(
            python_command("-c", code), capture_output=True, text=True, timeout=seconds, check=False, env=environment,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {seconds:.0f} s"}
    except OSError as error:
        return {"error": str(error)}
    lines = result.stdout.strip().splitlines()
    if result.returncode == 0 and lines:
        try:
            found = json.loads(lines[-1])
        except ValueError:
            found = None
        if isinstance(found, dict):
            return found
    lines = result.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"it ended with code {result.returncode}"}
