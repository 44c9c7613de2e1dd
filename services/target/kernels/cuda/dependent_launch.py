"""Programmatic dependent launch on CUDA: a kernel starts while the previous one still runs, then waits for its results.

Before it waits, a program may read data that no kernel of the chain writes, such as weights and tables. Every program
of every kernel in a chain waits before it ends, so a kernel that has waited has seen the end of all kernels before it.
Needs a GPU of compute capability 9.0; on others kernels run one after another.
"""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN201, N803

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl


@lru_cache
def supports_dependent_launch(device: torch.device) -> bool:
    """True if a device has dependent launches: the value of CHAINED, and of the launch option `launch_pdl`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def launch_dependents(CHAINED: tl.constexpr):
    """Allow the next kernel to start."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Wait for the results of the previous kernel."""
    if CHAINED:
        tl.extra.cuda.gdc_wait()
