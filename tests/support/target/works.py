"""Random work for a step of the target: chunks, plain rows and draft trees of sessions over leased pages."""

import numpy as np

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.tree import EMPTY_SLICE, SpeculationTree, TreeSlice
from services.target.step.batch import SessionWork
from tests.support.target.driving import opening, random_tree


def shuffled_allocator(rng, pages, page_size):
    """An allocator that leases pages in random order."""
    allocator = PageAllocator(pages, page_size)
    rng.shuffle(allocator._free)
    return allocator


def allocator_of(works):
    """The allocator of the sessions' pages."""
    return works[0].chunk.session.table.allocator


def random_slice(rng, size):
    """A draft tree of random shape and tokens."""
    parents = np.array([rng.integers(-1, i) for i in range(size)], np.int32).reshape(size)
    depths = np.zeros(size, np.int32)
    for i, parent in enumerate(parents):
        depths[i] = 1 if parent < 0 else depths[parent] + 1
    return TreeSlice(rng.integers(0, 50, size).astype(np.uint32), parents, depths, np.zeros(size, np.float32))


def repetitive_slice(rng, size) -> TreeSlice:
    """A draft tree over few tokens, so that paths repeat tokens of the text and of themselves."""
    parents = np.array([rng.integers(-1, i) if i else -1 for i in range(size)], np.int32)
    depths = np.ones(size, np.int32)
    for node, parent in enumerate(parents):
        depths[node] = 1 if parent < 0 else depths[parent] + 1
    return TreeSlice(rng.integers(0, 6, size).astype(np.uint32), parents, depths, np.zeros(size, np.float32))


def random_works(rng, page_size, sessions, longest=120, nodes=17):
    """Prompt chunks, plain rows and tree rows, over leased pages in random order."""
    allocator = shuffled_allocator(rng, sessions * ((longest + nodes) // page_size + 6), page_size)
    works = []
    for i in range(sessions):
        kind = rng.choice(["chunk", "plain", "tree", "prompt and tree"])
        length = int(rng.integers(1, longest))
        session = Session(opening(i, rng.integers(0, 50, length).tolist()), PrefixCache(allocator))
        start = 0 if kind == "prompt and tree" else int(rng.integers(0, length))
        start = length - 1 if kind in ("plain", "tree") else start
        stop = int(rng.integers(start + 1, length + 1)) if kind == "chunk" else length
        draft = random_slice(rng, int(rng.integers(1, nodes)) if "tree" in kind else 0)
        session.table.reserve(stop + len(draft))
        works.append(SessionWork(Chunk(session, start, stop), draft))
    return works


def random_case(rng, sessions, most, tokens=4):
    """Plain rows and draft trees, with samples that mostly follow the trees. Returns works, samples, allocator."""
    page_size = int(rng.integers(1, 5))
    allocator = shuffled_allocator(rng, 400, page_size)
    works, sampled = [], []
    for i in range(sessions):
        text = rng.integers(0, tokens, rng.integers(1, 20)).tolist()
        session = Session(opening(i, text), PrefixCache(allocator))
        tree = SpeculationTree(session.tokens)
        tree.merge(random_tree(rng, i, text, tokens, int(rng.integers(1, 3 * most))))
        draft = tree.select(int(rng.integers(0, most + 1))) if rng.random() < 0.8 else EMPTY_SLICE
        session.table.reserve(len(text) + len(draft))
        works.append(SessionWork(Chunk(session, len(text) - 1, len(text)), draft))
        own = rng.integers(-1, tokens + 1, len(draft) + 1)  # some rows have no token
        for parent, token in zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True):
            if rng.random() < 0.6:
                own[parent + 1] = token
        sampled.append(own)
    return works, sampled, allocator


def decoding(rows, page_size=4):
    """Works with a number of rows in total: plain rows, trees and chunks, over pages in random order."""
    rng = np.random.default_rng(rows)
    while True:
        works = random_works(rng, page_size, int(rng.integers(1, 5)))
        for work in works:
            work.chunk.start = max(work.chunk.start, work.chunk.stop - int(rng.integers(1, 4)))
        if sum(len(work.chunk) + len(work.draft) for work in works) == rows:
            return works
