"""Thread pools of single operators; a program has its own pool."""

from __future__ import annotations

import functools

import torch

from outrider.native import freed_with
from services.target.kernels.cpu import library


class Pool:
    """A pool of threads in the kernels' library."""

    def __init__(self, threads: int) -> None:
        functions = library.load()
        self.handle: int = functions.outrider_pool_new(threads)
        freed_with(self, functions.outrider_pool_free, self.handle)


@functools.cache
def _pool(threads: int) -> Pool:
    return Pool(threads)


def shared_pool(threads: int | None = None) -> Pool:
    """The pool that all operators share. Only the engine thread may use it. threads: by default PyTorch's number."""
    return _pool(torch.get_num_threads() if threads is None else threads)
