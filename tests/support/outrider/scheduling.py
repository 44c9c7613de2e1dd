"""A scheduler and its sessions, with pools small enough to check by hand."""

import numpy as np

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import OpenSession
from outrider.serving.portions import Limits
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams, StopConditions


def scheduler(pages=8, page_size=4, max_running=4, step=16, **limits):
    return Scheduler(PrefixCache(PageAllocator(pages, page_size)), Limits(max_running, step, **limits))


def session(s, session_id, length, *, shared=0, committed=(), **options):
    """A session that shares its first tokens with others, and no later one."""
    own = range(1000 * session_id + shared + 1, 1000 * session_id + length + 1)
    tokens = np.array([*range(1, shared + 1), *own, *committed], np.uint32)
    return Session(OpenSession(session_id, tokens, length, SamplingParams(), StopConditions(100), **options), s.prefix)


def spans(chunks):
    return [(chunk.session.id, chunk.start, chunk.stop) for chunk in chunks]


def advance(s, chunks):
    """An engine's part of a plan: compute the chunks, and commit one token after a last chunk."""
    for chunk in chunks:
        chunk.session.computed = chunk.stop
        if chunk.last:
            chunk.session.append(np.array([7]))
