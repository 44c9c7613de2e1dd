"""Random cases for the Triton attention kernel under Triton's interpreter."""

import numpy as np
import torch

from services.target.kernels.cuda.ragged import Split
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.step.batch import build
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.works import allocator_of, random_works

need_interpreter()

from services.target.kernels.cuda.attention import Tile  # noqa: E402

CPU = torch.device("cpu")
LONGEST = 72  # tokens: parts of three splits; the interpreter takes about 1 ms for each tile of keys
SMALL = Tile(lanes=16, keys=16, split=Split(32, 32), warps=4, stages=2)


def attention_case(seed, heads=(4, 2), dims=(16, 16), page_size=16, dtype=torch.float32, sessions=3, pool_dtype=None):
    """A batch of random works with queries and pools. Returns batch, q, keys, values."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    works = random_works(rng, page_size, sessions, LONGEST)
    batch = build(works, CPU)
    pages = allocator_of(works).total_pages
    cache = KVCache([LayerShape(heads[1], *dims)], pages, page_size, pool_dtype or dtype, CPU)
    for pool in (cache.keys[0], cache.values[0]):
        pool.copy_(torch.full(pool.shape, torch.nan))  # rows that were not written must not be read
        pool[0] = 0.0
    for span in batch.spans:
        slots = torch.from_numpy(span.slots)
        keys, values = torch.randn(span.kv_tokens, heads[1], dims[0]), torch.randn(span.kv_tokens, heads[1], dims[1])
        cache.keys[0].flatten(0, 1)[slots] = keys.to(cache.keys[0].dtype)
        cache.values[0].flatten(0, 1)[slots] = values.to(cache.values[0].dtype)
    return batch, torch.randn(len(batch), heads[0], dims[0]).to(dtype), cache.keys[0], cache.values[0]
