"""Allocator of a KV pool's pages: a free list, a reference count for each page, and an audit.

free    no session holds the page
leased  one session holds the page, or several share it
cached  no session holds the page; the prefix cache (prefix.py) keeps it until its room is needed

free + leased + cached = total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import EngineFault

# Page 0 is never leased: padding reads and writes it, so that it cannot damage a session's pages.
NULL_PAGE = 0


class OutOfPages(Exception):
    """The pool has too few pages for a lease. The scheduler waits or preempts; users never see this error."""


class PageAllocator:
    """Leases pages 1 .. total_pages of a pool. Owned by the engine thread; not thread-safe."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        """total_pages: usable pages, without NULL_PAGE. page_size: tokens per page."""
        self.total_pages = total_pages
        self.page_size = page_size
        # Called with the number of pages that the free list lacks; must drop as many cached pages, or all of them.
        self.reclaim: Callable[[int], None] = lambda _: None
        self._free = list(range(total_pages, NULL_PAGE, -1))
        self._holders = [0] * (total_pages + 1)  # of each page
        self._kept: set[int] = set()  # pages in the prefix cache, held or not
        self._leased = 0
        self._cached = 0

    @property
    def free_pages(self) -> int:
        """Number of pages that can be leased now, cached ones included."""
        return len(self._free) + self._cached

    @property
    def cached_pages(self) -> int:
        """Number of pages that only the prefix cache keeps."""
        return self._cached

    @property
    def leased_pages(self) -> int:
        """Number of pages that sessions hold."""
        return self._leased

    def pages_for(self, tokens: int) -> int:
        """Number of pages for a number of tokens."""
        return -(-tokens // self.page_size)

    def holders(self, page: int) -> int:
        """Number of holders of a page."""
        return self._holders[page]

    def lease(self, count: int) -> list[int]:
        """Lease pages for one holder, all or none; cached pages are dropped as needed. Raises OutOfPages."""
        if count > self.free_pages:
            raise OutOfPages(f"{count} pages wanted, {self.free_pages} of {self.total_pages} free")
        if count <= 0:
            return []
        if count > len(self._free):
            self.reclaim(count - len(self._free))
            assert count <= len(self._free), "every cached page can be reclaimed"
        pages = self._free[: -count - 1 : -1]  # ascending, so that consecutive tokens are close in memory
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        self._leased += count
        return pages

    def share(self, page: int) -> None:
        """Add a holder to a page that is leased or cached."""
        if not self._holders[page]:
            assert page in self._kept, "a free page is leased, not shared"
            self._cached -= 1
            self._leased += 1
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a holder from each page. Raises EngineFault for a page without holders."""
        for page in pages:
            holders = self._holders[page] - 1
            if holders < 0:
                raise EngineFault(f"page {page} was given back, but it is not leased")
            self._holders[page] = holders
            if not holders:
                self._leased -= 1
                if page in self._kept:
                    self._cached += 1
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Keep a held page after its last holder releases it, for the prefix cache."""
        assert self._holders[page], "a page is held when the prefix cache takes it"
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Stop keeping a page; it is free once it has no holder."""
        self._kept.remove(page)
        if not self._holders[page]:
            self._cached -= 1
            self._free.append(page)

    def check(self, expected_leased: int | None = None, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Audit the counts: free + leased + cached = total, no page twice. Raises EngineFault.

        expected_leased: number of held pages. tables: the pages of every holder.
        """
        free = set(self._free)
        held = {page for page, holders in enumerate(self._holders) if holders}
        cached = self._kept - held
        parts = (len(free), len(held), len(cached))
        if (
            sum(parts) != self.total_pages
            or len(free | held | cached) != self.total_pages
            or (len(self._free), self._leased, self._cached) != parts
            or NULL_PAGE in free | held | cached
        ):
            raise EngineFault(
                f"page audit: {len(self._free)} free + {self._leased} leased + {self._cached} cached pages are booked, "
                f"{parts[0]} + {parts[1]} + {parts[2]} found, of {self.total_pages}"
            )
        if expected_leased is not None and expected_leased != len(held):
            raise EngineFault(f"page audit: {len(held)} pages leased, sessions hold {expected_leased}")
        if tables is not None:
            count = Counter(page for pages in tables for page in pages)
            wrong = [page for page, holders in enumerate(self._holders) if count[page] != holders]
            if wrong:
                raise EngineFault(
                    f"page audit: page {wrong[0]} has {self._holders[wrong[0]]} holders in the books, "
                    f"{count[wrong[0]]} sessions hold it"
                )
