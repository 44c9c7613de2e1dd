"""Flags of the target that a CPU cannot follow: a command line that was written for a GPU starts there, too."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import TypeVar

from outrider.config.target import TargetOptions

FLOAT16_NOTE = "--dtype float16: a CPU has no kernels for it; the target computes in {}"

_GRAPHS = ("disable_cuda_graph", "cuda_graph_max_bs", "cuda_graph_bs", "disable_cuda_graph_padding")

Options = TypeVar("Options", bound=TargetOptions)


def for_cpu(options: Options) -> tuple[Options, list[str]]:
    """The target's flags as a CPU follows them, and a note for each one that is changed or without effect.

    The number format of the computation is chosen later, because it depends on the checkpoint.
    """
    notes = []
    defaults = {field.name: field.default for field in fields(options)}
    graphs = [name for name in _GRAPHS if getattr(options, name) != defaults[name]]
    if graphs:
        notes.append(f"{_flags(graphs)} without effect on a CPU: there are no CUDA graphs")
    idle = [*graphs, *(["disable_overlap_schedule"] if options.disable_overlap_schedule else [])]
    if options.disable_overlap_schedule:
        notes.append("--disable-overlap-schedule is without effect on a CPU: its steps never overlap")
    changes = {name: defaults[name] for name in idle}
    if options.quantization == "fp8":
        notes.append("--quantization fp8: a CPU has no kernels for it; weights are int8, which takes the same memory")
        changes["quantization"] = "int8"
    if options.attention_backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        notes.append("--attention-backend triton needs a CUDA device; the CPU's own kernels are used")
        changes["attention_backend"] = "auto"
    return replace(options, **changes), notes  # type: ignore[arg-type]


def _flags(names: list[str]) -> str:
    return f"{', '.join('--' + name.replace('_', '-') for name in names)} {'is' if len(names) == 1 else 'are'}"
