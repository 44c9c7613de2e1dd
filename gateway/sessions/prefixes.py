"""Estimate of the prefix cache of a replica: hashes of the pages of all texts that were sent to it.

A page's hash covers all tokens up to the page's end, so a text is a chain of hashes, and two texts share a prefix as
far as their chains are equal. The replica is not asked: it may have evicted a page that is listed here, or cache one
that is not. A wrong estimate costs the computation of some pages, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from outrider.paging.prefix import page_keys

MAX_PAGES = 1 << 16  # listed per replica, about 8 MB
DEFAULT_PAGE_SIZE = 16  # tokens, for replicas that do not report theirs


class PrefixHashes:
    """Chained hashes of a growing text's full pages. Each call hashes the new pages only."""

    def __init__(self, salt: str = "") -> None:
        """salt: texts of different salts share no hash."""
        self._root = hash(salt)
        self._hashes: dict[int, list[int]] = {}  # by page size

    def of(self, tokens: Sequence[int], page_size: int) -> list[int]:
        """Hashes of the full pages of a text that begins with the text of the last call. page_size: in tokens."""
        hashes = self._hashes.setdefault(page_size, [])
        fresh = np.array(tokens[len(hashes) * page_size :], np.uint32)
        last = hashes[-1] if hashes else self._root
        for key in page_keys(fresh, page_size):
            last = hash((last, key))
            hashes.append(last)
        return hashes


class CachedPrefixes:
    """Pages that one replica has probably cached, in LRU order, later pages of a text before earlier ones.

    So a listed page implies that all pages before it are listed.
    """

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Number of listed pages."""
        return len(self._pages)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of listed pages of a text, from its first page on."""
        return bisect_left(hashes, True, key=lambda page: page not in self._pages)

    def add(self, hashes: Sequence[int], capacity: int) -> None:
        """A text was sent to the replica. capacity: pages of the replica, at least 1."""
        for page in reversed(hashes[:capacity]):
            self._pages[page] = None
            self._pages.move_to_end(page)
        while len(self._pages) > capacity:
            self._pages.popitem(last=False)

    def clear(self) -> None:
        """The replica has restarted."""
        self._pages.clear()
