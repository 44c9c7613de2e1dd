"""What is installed: versions against the project's ranges, libraries of the devices, compiled kernels."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from outrider import __version__
from outrider.doctor.findings import Finding, note, ok, problem
from outrider.doctor.probes import KERNELS, Facts
from outrider.placement.accelerators import CUDA13_DRIVER
from outrider.placement.devices import Gpu

TOPIC = "software"
# Packages that are named with their versions, by part; the others of a part are checked, too.
_MAIN = {
    "shared": ("grpcio", "numpy", "protobuf"),
    "gateway": ("fastapi", "uvicorn", "tokenizers"),
    "draft": ("jax", "jaxlib"),
    "target": ("torch", "transformers"),
}
_LARGE = ("torch", "transformers", "jax")
_PLUGINS = {12: "jax-cuda12-plugin", 13: "jax-cuda13-plugin"}
_COMPILERS = ("g++", "clang++", "c++")
_INSTALL = "make -B install"
_UNINSTALL = f"`{sys.executable} -m pip uninstall torch`"  # else pip keeps the build that is there

VersionOf = Callable[[str], str | None]


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements(lines: Sequence[str] | None = None) -> dict[str, list[Requirement]]:
    """The project's requirements by part. lines: as its metadata have them; default those of this installation."""
    if lines is None:
        try:
            lines = importlib.metadata.requires("outrider") or ()
        except importlib.metadata.PackageNotFoundError:  # started from a checkout that is not installed
            lines = ()
    every = [Requirement(line) for line in lines]
    found = {"shared": [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]}
    for part in ("gateway", "draft", "target"):
        extra = [one for one in every if one.marker is not None and one.marker.evaluate({"extra": part})]
        found[part] = [one for one in extra if one not in found["shared"]]
    return found


def packages(needed: Mapping[str, Sequence[Requirement]], find: VersionOf = version_of) -> Iterator[Finding]:
    """A finding for each part. needed: its requirements."""
    yield ok(TOPIC, "outrider", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    for part, wanted in needed.items():
        versions = {one.name: find(one.name) for one in wanted}
        missing = sorted(name for name, version in versions.items() if version is None)
        if missing:
            extra = "outrider" if part == "shared" else f"outrider[{part}]"
            remedy = f'run `{_INSTALL}`, or pip install "{extra}"'
            yield problem(TOPIC, part, f"not installed: {', '.join(missing)}", remedy)
            continue
        names = ", ".join(f"{name} {versions.get(name) or find(name) or 'missing'}" for name in _MAIN[part])
        outside = [
            f"{one.name} {version}, tested with {one.specifier}" for one in wanted
            if (version := versions[one.name]) and not one.specifier.contains(version, prereleases=True)
        ]  # fmt: skip
        if outside:
            yield note(TOPIC, part, f"{names}; untested: {'; '.join(outside)}", f"run `{_INSTALL}`")
        else:
            yield ok(TOPIC, part, names)


def torch(facts: Facts, found: Sequence[Gpu], *, wanted: bool, find: VersionOf = version_of) -> Finding:
    """PyTorch and its device. facts: of its child process. found: the GPUs. wanted: the flags leave it a GPU."""
    name = "PyTorch"
    if "error" in facts:
        return problem(TOPIC, name, f"cannot be imported: {facts['error']}", f"run `{_INSTALL}`")
    triton = find("triton")
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else "a build without CUDA"
    text = f"{facts['version']} ({build}){f', Triton {triton}' if triton and facts['cuda'] else ''}"
    warned = "; ".join(line.splitlines()[0] for line in facts.get("warnings", ()))
    if facts["available"]:
        text += f", sees {', '.join(facts['devices'])}"
        return note(TOPIC, name, f"{text}, and warns: {warned}") if warned else ok(TOPIC, name, text)
    if not found:
        return ok(TOPIC, name, f"{text}, for the CPU")
    if not facts["cuda"]:
        found_problem = f"{text}: the target computes on the CPU beside an unused GPU"
        remedy = f"run {_UNINSTALL}, then `{_INSTALL}`"
    else:
        found_problem = f"{text} cannot use the GPU{f': {warned}' if warned else ''}"
        remedy = f"install driver {CUDA13_DRIVER} or later; or run {_UNINSTALL}, then `{_INSTALL}`"
    return problem(TOPIC, name, found_problem, remedy) if wanted else note(TOPIC, name, found_problem, remedy)


def jax(
    facts: Facts, found: Sequence[Gpu], tpus: int, *, wanted: bool, find: VersionOf = version_of
) -> Finding:  # fmt: skip
    """JAX and its device. wanted: the draft has a model, and flags leave it a GPU or a TPU."""
    name = "JAX"
    plugins = {major: version for major, package in _PLUGINS.items() if (version := find(package))}
    jaxlib = find("jaxlib")
    wrong = [f"{_PLUGINS[major]} {version}" for major, version in plugins.items() if version != jaxlib]
    if found and wrong:
        text = f"{', '.join(wrong)} beside jaxlib {jaxlib}: JAX loads a plugin of its own version alone"
        return problem(TOPIC, name, text, f'pip install "jax[cuda{max(plugins)}]=={jaxlib}"')
    if "error" in facts:
        return problem(TOPIC, name, f"finds no devices: {facts['error']}", f"run `{_INSTALL}`; see JAX_PLATFORMS")
    names = ", ".join(dict.fromkeys(facts["devices"]))
    with_plugin = "".join(f", plugin for CUDA {major}" for major in plugins)
    text = f"{facts['version']}{with_plugin}, sees {len(facts['devices'])} x {names}"
    if (found or tpus) and facts["platform"] == "cpu":
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            return note(TOPIC, name, f"{text}: JAX_PLATFORMS=cpu hides the other devices", "unset JAX_PLATFORMS")
        accelerator = "tpu" if not found else None
        lacks = "TPU library" if accelerator else "CUDA plugin" if not plugins else "working CUDA plugin"
        remedy = f"run `{_INSTALL}{' ACCELERATOR=tpu' if accelerator else ''}`"
        text = f"{text}, without a {lacks}: a draft model computes on the CPU"
        return problem(TOPIC, name, text, remedy) if wanted else note(TOPIC, name, text, remedy)
    return ok(TOPIC, name, text)


def torchao(quantization: str | None, *, on_gpu: bool, find: VersionOf = version_of) -> Iterator[Finding]:
    """The library of fp8 weights, where they are asked for on a GPU."""
    if quantization != "fp8" or not on_gpu:
        return
    version = find("torchao")
    if version is None:
        remedy = f'run `{_INSTALL}`, or pip install "outrider[target-cuda13]"'
        yield problem(TOPIC, "torchao", "not installed; --quantization fp8 needs it", remedy)
    else:
        yield ok(TOPIC, "torchao", version)


def kernels(answers: Mapping[str, Facts]) -> Iterator[Finding]:
    """The compiled CPU kernels. answers: of the child processes, by part."""
    compiler = next((name for name in _COMPILERS if shutil.which(name)), None)
    for part, facts in answers.items():
        name = "n-grams" if part == "n-grams" else f"{part}'s C++"
        command = f"{Path(sys.executable)} -m {KERNELS[part][0]}"
        if reason := facts.get("error") or facts.get("unavailable"):
            yield note(TOPIC, name, f"not used, because {reason}")
        elif facts["path"]:
            yield ok(TOPIC, name, f"compiled: {facts['path']}")
        elif compiler is None:
            text = "not compiled, and there is no C++ compiler: slower code is used instead"
            yield note(TOPIC, name, text, f"install g++, then run {command}")
        else:
            text = f"not compiled yet; the first start does so with {compiler}, in up to a minute"
            yield note(TOPIC, name, text, f"run {command}")


def bytecode(names: Sequence[str] = _LARGE) -> Finding:
    """Whether Python caches the compiled modules of the largest libraries, or compiles them again at each start."""
    specs = [spec for name in names if (spec := importlib.util.find_spec(name)) and spec.origin]
    files = [Path(importlib.util.cache_from_source(str(spec.origin))) for spec in specs]
    lacking = [spec.name for spec, file in zip(specs, files, strict=True) if not file.exists()]
    folders = [next(path for path in file.parents if path.exists()) for file in files]
    if not lacking:
        return ok(TOPIC, "bytecode", f"{', '.join(spec.name for spec in specs) or 'nothing'} cached")
    if not sys.dont_write_bytecode and all(os.access(folder, os.W_OK) for folder in folders):
        return ok(TOPIC, "bytecode", f"{', '.join(lacking)}: cached when first imported")
    why = "PYTHONDONTWRITEBYTECODE is set" if sys.dont_write_bytecode else "its folder cannot be written to"
    text = f"{', '.join(lacking)}: compiled at every start, for seconds, because {why}"
    return note(TOPIC, "bytecode", text, "run python -m compileall once")
