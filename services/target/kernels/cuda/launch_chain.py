"""Launches in a chain on CUDA: a program starts while the launch before its own still runs, and waits for its results.

Before it waits a program may read what was there before the chain began, such as tables. Every program of every launch
in a chain waits before it ends, so that a launch that has waited has seen the end of all before it. Needs a GPU of
compute capability 9.0; elsewhere launches follow one another.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN201, N803

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def chained(device: torch.device) -> bool:
    """Whether launches on a device form chains: CHAINED, and `launch_pdl`, of each."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def let_go(CHAINED: tl.constexpr):
    """The next launch may start."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Wait for the results of the launch before."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
