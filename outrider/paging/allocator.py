"""Pages of a KV pool: a free list, how many hold each page, and books that can be audited.

free    nobody's: leased again at will
leased  held by one session, or shared by several
cached  held by nobody, kept by the prefix cache (prefix.py) until its room is needed

free + leased + cached = total
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from outrider.errors import EngineFault

# Page 0 belongs to nobody: padded rows read and write it, so that they can harm nobody.
NULL_PAGE = 0


class OutOfPages(Exception):
    """The pool cannot cover a request for pages. The scheduler waits or preempts; users never see it."""


class PageAllocator:
    """Hands out pages 1 .. total_pages of a pool. One owner (the engine thread); not thread-safe."""

    def __init__(self, total_pages: int, page_size: int) -> None:
        """total_pages: usable pages, NULL_PAGE not counted. page_size: tokens a page."""
        self.total_pages = total_pages
        self.page_size = page_size
        # Asked for a number of pages when the free list is short; must drop as many cached ones, or all there are.
        self.reclaim: Callable[[int], None] = lambda _: None
        self._free = list(range(total_pages, NULL_PAGE, -1))
        self._holders = [0] * (total_pages + 1)  # of each page
        self._kept: set[int] = set()  # pages that the prefix cache knows, held or not
        self._leased = 0
        self._cached = 0

    @property
    def free_pages(self) -> int:
        """Pages that can be leased now; cached ones count, for they give way."""
        return len(self._free) + self._cached

    @property
    def cached_pages(self) -> int:
        """Pages that nobody holds and the prefix cache keeps."""
        return self._cached

    @property
    def leased_pages(self) -> int:
        """Pages that somebody holds."""
        return self._leased

    def pages_for(self, tokens: int) -> int:
        """Pages that hold a number of tokens."""
        return -(-tokens // self.page_size)

    def holders(self, page: int) -> int:
        """How many hold a page."""
        return self._holders[page]

    def lease(self, count: int) -> list[int]:
        """Take pages for one holder, all or none; cached ones are dropped as needed. Raises OutOfPages."""
        if count > self.free_pages:
            raise OutOfPages(f"{count} pages wanted, {self.free_pages} of {self.total_pages} free")
        if count <= 0:
            return []
        if count > len(self._free):
            self.reclaim(count - len(self._free))
            assert count <= len(self._free), "every cached page can be reclaimed"
        pages = self._free[: -count - 1 : -1]  # ascending, so that neighbours in a text are neighbours in memory
        del self._free[-count:]
        for page in pages:
            self._holders[page] = 1
        self._leased += count
        return pages

    def share(self, page: int) -> None:
        """Become one more holder of a page that is leased or cached."""
        if not self._holders[page]:
            assert page in self._kept, "a free page is leased, not shared"
            self._cached -= 1
            self._leased += 1
        self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Stop holding pages. Raises EngineFault for a page that nobody holds."""
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
        """Do not free a page that is held, once it is held no longer."""
        assert self._holders[page], "what is kept is held at first"
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Keep a page no longer; it is free once nobody holds it."""
        self._kept.remove(page)
        if not self._holders[page]:
            self._cached -= 1
            self._free.append(page)

    def check(self, expected_leased: int | None = None, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Audit the books: free + leased + cached = total, nothing twice. Raises EngineFault.

        expected_leased: pages that are held. tables: the pages of every holder there is.
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
