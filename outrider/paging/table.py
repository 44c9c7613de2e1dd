"""The page table of one session: its lease of pages.

Invariant between steps: the cache holds every committed token but the last.

    slots   0 ................ n-2 | n-1 | n ..........
            committed, in cache    | root and draft tokens of the present step
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.paging.allocator import PageAllocator


class PageTable:
    """Maps a session's token positions to slots of the pool. A slot is page * page_size + offset.

    allocator: leases the pages
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self.allocator = allocator
        self._pages = np.empty(8, dtype=np.int32)
        self._count = 0

    @property
    def pages(self) -> NDArray[np.int32]:
        """The leased pages, in order of position. [pages] int32, a view."""
        return self._pages[: self._count]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.allocator.page_size

    @property
    def capacity(self) -> int:
        """Capacity of the leased pages, in tokens."""
        return self._count * self.allocator.page_size

    def reserve(self, tokens: int) -> None:
        """Lease the missing pages for a number of tokens. Raises OutOfPages, and leases no page then."""
        missing = self.allocator.pages_for(tokens) - self._count
        if missing <= 0:
            return
        self._extend(self.allocator.lease(missing))

    def _extend(self, pages: Sequence[int]) -> None:
        end = self._count + len(pages)
        if end > len(self._pages):
            self._pages = np.resize(self._pages, max(2 * len(self._pages), end))
        self._pages[self._count : end] = pages
        self._count = end

    def truncate(self, tokens: int) -> None:
        """Release the pages after those of the first `tokens` tokens."""
        keep = self.allocator.pages_for(tokens)
        if keep >= self._count:
            return
        self.allocator.release(self._pages[keep : self._count].tolist())
        self._count = keep

    def release(self) -> None:
        """Release all pages."""
        self.allocator.release(self.pages.tolist())
        self._count = 0

    def slot(self, position: int) -> int:
        """Slot of a position."""
        page, offset = divmod(position, self.allocator.page_size)
        return int(self._pages[page]) * self.allocator.page_size + offset

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        """Slots of the positions start .. stop - 1. [stop - start] int64."""
        positions = np.arange(start, stop)
        size = self.allocator.page_size
        return self._pages[positions // size].astype(np.int64) * size + positions % size
