"""Dimensions of the measured model, and batches of sessions whose context is in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.gpu.dimensions import Dimensions
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.kernels.kv_cache import KVCache
from services.target.step.batch import SessionWork

PAGE = 16
VERIFIED = 16  # tokens of a session in a verification step, root included
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Size(Dimensions):
    """Dimensions of the model and the measured cells.

    cells: sessions, and tokens of context of each; compiled: cells that are also measured with compiled layers
    """

    cells: tuple[tuple[int, int], ...] = (
        (1, 1024), (1, 8192), (1, 32768), (4, 1024), (4, 8192), (16, 1024), (16, 8192), (16, 32768), (64, 1024),
        (64, 8192),
    )  # fmt: skip
    compiled: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (16, 1024))
    verify_up_to: int = 16  # sessions
    engine_sessions: tuple[int, ...] = (1, 16, 64)
    repeats: int = 20


TINY = Size(64, 128, 2, 4, 2, 512, ((1, 64), (2, 100)), ((1, 64),), 2, (1, 2), 2)


def sessions(count: int, context: int, tokens: int, cache: KVCache) -> list[SessionWork]:
    """The work of `count` sessions: a root, a root with a draft chain (up to VERIFIED tokens), or a prompt chunk.

    tokens: of each session in the step
    """
    allocator = PageAllocator(cache.pages, PAGE)
    works = []
    for i in range(count):
        stop = StopConditions(max_tokens=64)
        request = OpenSession(i, np.arange(context, dtype=np.uint32) % 500, context, GREEDY, stop)
        session = Session(request, PrefixCache(allocator))
        nodes = tokens - 1 if tokens <= VERIFIED else 0
        session.table.reserve(context + nodes)
        chain = np.arange(-1, nodes - 1, dtype=np.int32)
        draft = TreeSlice(chain.astype(np.uint32) + 2, chain, chain + 2, np.zeros(nodes, np.float32))
        start = context - 1 if tokens <= VERIFIED else context - tokens
        works.append(SessionWork(Chunk(session, start, context), draft if nodes else EMPTY_SLICE))
    return works
