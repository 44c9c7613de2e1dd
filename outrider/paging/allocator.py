"""Pages of a KV pool: a free list, and books that can be audited."""

from __future__ import annotations

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
        self._free = list(range(total_pages, NULL_PAGE, -1))
        self._leased: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that can be leased now."""
        return len(self._free)

    @property
    def leased_pages(self) -> int:
        """Pages that are out."""
        return len(self._leased)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold a number of tokens."""
        return -(-tokens // self.page_size)

    def lease(self, count: int) -> list[int]:
        """Take pages, all or none. Raises OutOfPages."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.total_pages} free")
        if count <= 0:
            return []
        pages = self._free[-count:]
        del self._free[-count:]
        self._leased.update(pages)
        return pages

    def release(self, pages: list[int]) -> None:
        """Give pages back. Raises EngineFault for a page that is not out."""
        for page in pages:
            if page not in self._leased:
                raise EngineFault(f"page {page} was given back, but it is not leased")
            self._leased.remove(page)
            self._free.append(page)

    def check(self, expected_leased: int | None = None) -> None:
        """Audit the books: free + leased = total, nothing twice. Raises EngineFault."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._leased or len(free) + len(self._leased) != self.total_pages:
            raise EngineFault(
                f"page audit: {len(self._free)} free + {len(self._leased)} leased != {self.total_pages} pages"
            )
        if expected_leased is not None and expected_leased != len(self._leased):
            raise EngineFault(f"page audit: {len(self._leased)} pages leased, sessions hold {expected_leased}")
