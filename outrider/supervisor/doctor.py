"""`outrider doctor`: versions, devices, cores, caches and models of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

from outrider import __version__
from outrider.checkpoints import checksums, conversion
from outrider.config import Algorithm, format_cores
from outrider.errors import ConfigError
from outrider.placement.cores import plan_cores

_PACKAGES = {
    "shared": ("grpcio", "numpy", "protobuf"),
    "gateway": ("fastapi", "uvicorn", "tokenizers"),
    "draft": ("jax", "jaxlib"),
    "target": ("torch", "transformers"),
}
_LARGE = ("torch", "transformers", "jax")
# Run in child processes: importing both libraries takes seconds and would reserve device memory.
_DEVICES = {
    "torch": "import torch; n = torch.cuda.device_count(); "
    "print(', '.join(torch.cuda.get_device_name(i) for i in range(n)) or 'cpu')",
    "jax": "import jax; print(', '.join(str(d) for d in jax.devices()))",
}


def report() -> list[tuple[str, str]]:
    """Versions, devices, cores, caches and models of this machine, as names and values."""
    facts = [("outrider", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")]
    for part, packages in _PACKAGES.items():
        facts.append((part, ", ".join(f"{name} {_version(name)}" for name in packages)))
    for library, question in _DEVICES.items():
        facts.append((f"{library} devices", _answer(question) if importlib.util.find_spec(library) else "-"))
    folder = conversion.cache_folder()
    models = [_converted(path) for path in sorted((folder / "models").glob("*")) if path.is_dir()]
    facts += _cores()
    facts.append(("cache", f"{folder} ({_free_gib(folder):.0f} GiB free)"))
    facts.append(("compiled", _compiled()))
    facts.append(("converted", ", ".join(models) or "nothing yet"))
    facts.append(("default model", _default_model()))
    return facts


def _converted(folder: Path) -> str:
    """The name of a converted model, with what is wrong with its bytes."""
    reason = checksums.damage(folder, whole=True)
    return folder.name if reason is None else f"{folder.name} (damaged: {reason}; delete {folder})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compiled() -> str:
    """Whether Python caches the compiled modules of the largest libraries, or compiles them again at each start."""
    specs = [spec for name in _LARGE if (spec := importlib.util.find_spec(name)) and spec.origin]
    files = [Path(importlib.util.cache_from_source(str(spec.origin))) for spec in specs]
    lacking = [spec.name for spec, file in zip(specs, files, strict=True) if not file.exists()]
    folders = [next(path for path in file.parents if path.exists()) for file in files]
    if not lacking:
        return ", ".join(spec.name for spec in specs) or "-"
    if not sys.dont_write_bytecode and all(os.access(folder, os.W_OK) for folder in folders):
        return f"{', '.join(lacking)}: when first imported"
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "its folder cannot be written to"
    return f"{', '.join(lacking)}: at every start, for seconds, because {why}; run python -m compileall once"


def _answer(question: str) -> str:
    try:
        result = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return "no answer in two minutes"
    lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
    return lines[-1] if lines else f"failed with code {result.returncode}"


def _cores() -> list[tuple[str, str]]:
    usable = sorted(os.sched_getaffinity(0))
    facts = [("cores", format_cores(usable))]
    algorithms: tuple[Algorithm, ...] = ("NGRAM", "STANDALONE")
    for algorithm in algorithms:
        plan = plan_cores(usable, algorithm)
        target, draft, gateway = map(format_cores, (plan.target, plan.draft, plan.gateway))
        facts.append((f"  {algorithm}", f"target {target}; draft {draft}; gateway {gateway}"))
    return facts


def _free_gib(folder: Path) -> float:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free / 2**30


def _default_model() -> str:
    try:
        return str(conversion.default_gguf())
    except ConfigError as error:
        return error.message
