"""What a replica has probably cached: the pages of the texts that were sent there, by name.

A page's name is a hash of all tokens up to its end, so that a text is a chain of names, and what two texts share is
where their chains are equal. Nobody is asked: a replica may have dropped a page that is remembered here, or keep one
that is not. A wrong guess costs the computation of some pages, never a token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from outrider.paging.prefix import page_keys

MOST_PAGES = 1 << 16  # that are remembered of a replica, which takes some 8 MB
PAGE_SIZE = 16  # tokens, of replicas that do not tell


class Trail:
    """The names of a growing text's full pages. Only what is new is hashed."""

    def __init__(self, salt: str = "") -> None:
        """salt: texts of different ones share nothing."""
        self._root = hash(salt)
        self._names: dict[int, list[int]] = {}  # by page size

    def names(self, tokens: Sequence[int], page_size: int) -> list[int]:
        """Names of the full pages of a text that begins with those of the last call. page_size: in tokens."""
        names = self._names.setdefault(page_size, [])
        fresh = np.array(tokens[len(names) * page_size :], np.uint32)
        name = names[-1] if names else self._root
        for key in page_keys(fresh, page_size):
            name = hash((name, key))
            names.append(name)
        return names


class Prefixes:
    """Pages of one replica, the longest unused forgotten first, later ones of a text before earlier ones.

    Hence whoever is remembered has all pages before it remembered, too.
    """

    def __init__(self) -> None:
        self._pages: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Pages that are remembered."""
        return len(self._pages)

    def reach(self, names: Sequence[int]) -> int:
        """How many pages of a text are remembered, from its first on."""
        return bisect_left(names, True, key=lambda name: name not in self._pages)

    def remember(self, names: Sequence[int], most: int) -> None:
        """A text has been sent there. most: pages that it keeps at a time, at least one."""
        for name in reversed(names[:most]):
            self._pages[name] = None
            self._pages.move_to_end(name)
        while len(self._pages) > most:
            self._pages.popitem(last=False)

    def forget(self) -> None:
        """It has begun anew."""
        self._pages.clear()
