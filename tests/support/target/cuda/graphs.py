"""Runners and caches for tests of captured steps."""

import torch

from outrider.paging.allocator import NULL_PAGE
from services.target.kernels.dispatch import choose
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.model.modules import ModuleRunner
from tests.support.target.decoders import module_of
from tests.support.target.works import allocator_of

CPU = torch.device("cpu")
SIZES = [1, 2, 4, 8, 12, 16]
SHAPES = [LayerShape(2, 16, 16)] * 2


def modules(folder, backend="torch_native", *, ordered=False):
    """A runner of the model's own modules, even if other kernels could run it."""
    return ModuleRunner(module_of(folder), choose(backend, CPU, ordered=ordered))


def history(works):
    """A cache of random numbers, in free pages, too."""
    allocator = allocator_of(works)
    cache = KVCache(SHAPES, allocator.total_pages, allocator.page_size, torch.float32, CPU)
    torch.manual_seed(0)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape))
        pool[NULL_PAGE] = 0.0
    return cache
