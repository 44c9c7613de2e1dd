"""A session as an engine holds it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import PageAllocator
from outrider.paging.table import PageTable
from outrider.serving.messages import OpenSession


class Session:
    """Tokens, cache lengths and pages of one session; one owner, the engine thread.

    Lengths, in tokens:   0 <= computed < length;   prompt_length <= length
        tokens  0 ........ computed | ........ length-1 |
                in the cache        | pending           |
    """

    def __init__(self, request: OpenSession, allocator: PageAllocator) -> None:
        self.id = request.session_id
        self.sampling = request.sampling
        self.stop = request.stop
        self.prompt_length = request.prompt_length
        self.length = len(request.tokens)
        self.computed = 0
        self.table = PageTable(allocator)
        self._tokens = np.empty(self.length + 256, dtype=np.uint32)
        self._tokens[: self.length] = request.tokens

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Prompt and committed tokens, [length] uint32, a view."""
        return self._tokens[: self.length]

    @property
    def pending(self) -> int:
        """Committed tokens that are not in the cache; at least 1."""
        return self.length - self.computed

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return self.length - self.prompt_length

    def append(self, tokens: NDArray[np.integer]) -> None:
        """Commit tokens, [n]."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self.length : end] = tokens
        self.length = end

    def evict(self) -> None:
        """Give all pages back; the tokens stay and are computed again later."""
        self.table.release()
        self.computed = 0
