"""Threads for single operators; a program has its own."""

from __future__ import annotations

import functools

import torch

from outrider.native import freed_with
from services.target.kernels.cpu import library


class Pool:
    """Threads that compute together."""

    def __init__(self, threads: int) -> None:
        functions = library.load()
        self.handle: int = functions.outrider_pool_new(threads)
        freed_with(self, functions.outrider_pool_free, self.handle)


@functools.cache
def _pool(threads: int) -> Pool:
    return Pool(threads)


def shared_pool(threads: int | None = None) -> Pool:
    """One pool for all operators of so many threads, by default PyTorch's; one caller at a time: the engine thread."""
    return _pool(torch.get_num_threads() if threads is None else threads)
