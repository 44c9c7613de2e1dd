"""Prefix cache: full pages of committed tokens, shared by the sessions that begin with the same tokens.

A page of keys and values depends on all tokens up to its end and on nothing else, so the cache is a tree: a node is a
page, its children are the pages that may follow, looked up by their very tokens. No two texts are ever taken for one.

    namespace ─── page 0 ─┬─ page 1 ─── page 2      a path is the beginning of a text
                          └─ page 1'

    lookup    when a session is admitted, and again while its prompt is computed: it holds what it finds, and reads it
    insertion as pages fill up with committed tokens: they become the cache's, the session goes on holding them
    eviction  of pages that nobody holds, when room is needed: the longest unused first, leaves before their parents

Only full pages of committed tokens are shared; a session writes behind them, into pages of its own, so that no page
need ever be copied. Sessions hold whole paths, hence a page that nobody holds has nothing held below it.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import EngineFault
from outrider.paging.allocator import NULL_PAGE, PageAllocator
from outrider.paging.table import PageTable

_MAX_NAME_LENGTH = 64  # characters of a namespace
_PAGES_PER_COPY = 64  # whose tokens are copied before they are looked up


class PageObserver(Protocol):
    """Keeps data of its own beside cached pages, such as hidden states. Called in the engine thread.

    owner: whose table it is; index: a page's place in the table, so that it holds the tokens from index * page_size on
    """

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """A page of an owner's table is the cache's from now on; if it knew the tokens, the table has its page now."""
        ...

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """False if an owner must compute a page itself that the cache has."""
        ...

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """An owner's table took a page from the cache instead of computing it."""
        ...

    def page_dropped(self, page: int) -> None:
        """A page is no longer the cache's; its owner, if there is one, goes on alone."""
        ...


class _Node:
    """A page of the cache. key: the bytes of its tokens, of a root its namespace; used: when it was let go last."""

    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, page: int, key: bytes, parent: _Node | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.used = 0


class PrefixCache:
    """The trees, one a namespace. Texts of different namespaces (adapters, tenants) never share a page."""

    def __init__(self, allocator: PageAllocator, *, enabled: bool = True) -> None:
        """Takes over the allocator's `reclaim`. enabled: else nothing is ever found or inserted."""
        self.allocator = allocator
        self.enabled = enabled
        self.observers: list[PageObserver] = []
        self.epoch = 0  # counts flushes; tables of an older one share nothing more
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by page
        self._leaves: list[tuple[int, int, _Node]] = []  # heap of (used, order, node); some are out of date
        self._clock = 0
        allocator.reclaim = self.evict

    def __len__(self) -> int:
        """Pages that the cache knows, held or not."""
        return len(self._nodes)

    def knows(self, node: _Node) -> bool:
        """True if a node is still in its tree; if so, all before it are."""
        return self._nodes.get(node.page) is node

    def find(
        self, namespace: str, tip: _Node | None, tokens: NDArray[np.uint32], owner: int = 0, index: int = 0
    ) -> list[_Node]:
        """The path that follows a node, or the namespace's root, along tokens that begin behind it.

        As far as an owner may have it, whose page of that place is the first one's.
        """
        node = tip or self._roots.get(namespace)
        path: list[_Node] = []
        if node is None:
            return path
        for key in page_keys(tokens, self.allocator.page_size):
            node = node.children.get(key)
            if node is None or not self.offers(node, owner, index + len(path)):
                break
            path.append(node)
        return path

    def offers(self, node: _Node, owner: int, index: int) -> bool:
        """True if an owner's table may have a page as that of a place."""
        return all(observer.page_offered(owner, index, node.page) for observer in self.observers)

    def insert(self, namespace: str, tip: _Node | None, key: bytes, page: int) -> _Node:
        """The node of these tokens behind a node, or the namespace's root; made of `page` if there is none yet."""
        parent = tip or self._roots.setdefault(namespace, _Node(NULL_PAGE, namespace.encode(), None))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = self._nodes[page] = _Node(page, key, parent)
            self.allocator.keep(page)
        return node

    def let_go(self, tip: _Node) -> None:
        """A table that ended in this node has released its pages."""
        if self.knows(tip):
            self._clock += 1
            tip.used = self._clock
            self._offer(tip)

    def evict(self, count: int) -> None:
        """Drop a number of pages that nobody holds, the longest unused first, leaves before their parents."""
        while count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if used != node.used or not self._evictable(node):
                continue
            count -= 1
            parent = node.parent
            self._drop(node)
            if parent is not None and parent.page != NULL_PAGE:
                self._offer(parent)

    def forget(self, tip: _Node) -> None:
        """Drop a path that cannot be trusted, up to where others hold it or branch off."""
        node: _Node | None = tip
        while node is not None and self._evictable(node):
            self._drop(node)
            node = node.parent

    def flush(self) -> None:
        """Forget everything, for instance because the weights have changed. What sessions hold stays theirs."""
        self.epoch += 1
        nodes = list(self._nodes)
        self._nodes.clear()
        self._roots.clear()
        self._leaves.clear()
        for page in nodes:
            self.allocator.drop(page)
            self._notify_dropped(page)

    def check(self) -> None:
        """Audit the trees against the allocator's books. Raises EngineFault."""
        offered = {node.page for used, _, node in self._leaves if used == node.used and self._evictable(node)}
        for page, node in self._nodes.items():
            parent = node.parent
            if parent is None or parent.children.get(node.key) is not node or node.page != page:
                raise EngineFault(f"page audit: cached page {page} is not where its parent looks for it")
            held = self.allocator.holders(page)
            if parent.page != NULL_PAGE and self.allocator.holders(parent.page) < held:
                raise EngineFault(f"page audit: cached page {page} is held, the one before it is not")
            if self._evictable(node) and page not in offered:
                raise EngineFault(f"page audit: cached page {page} can never be evicted")
        unheld = sum(not self.allocator.holders(page) for page in self._nodes)
        if unheld != self.allocator.cached_pages:
            raise EngineFault(f"page audit: {self.allocator.cached_pages} pages are cached, the trees have {unheld}")

    def _evictable(self, node: _Node) -> bool:
        return self.knows(node) and not node.children and not self.allocator.holders(node.page)

    def _offer(self, node: _Node) -> None:
        """Note a node for eviction if it can be evicted now; otherwise a later release or eviction will."""
        if not self._evictable(node):
            return
        if len(self._leaves) > 2 * len(self._nodes) + 64:  # mostly out of date
            self._leaves = [entry for entry in self._leaves if entry[0] == entry[2].used and self._evictable(entry[2])]
            heapq.heapify(self._leaves)
        self._clock += 1
        heapq.heappush(self._leaves, (node.used, self._clock, node))

    def _drop(self, node: _Node) -> None:
        parent = node.parent
        assert parent is not None, "roots have no page"
        del self._nodes[node.page]
        del parent.children[node.key]
        if parent.parent is None and not parent.children:
            del self._roots[parent.key.decode()]
        self.allocator.drop(node.page)
        self._notify_dropped(node.page)

    def _notify_dropped(self, page: int) -> None:
        for observer in self.observers:
            observer.page_dropped(page)


class SharedTable(PageTable):
    """A page table whose first pages may be the cache's; those behind them are its own.

    pages   0 ...... shared-1 | shared ........
            read only         | written
    """

    def __init__(self, cache: PrefixCache, namespace: str = "", owner: int = 0) -> None:
        """owner: told to the cache's observers."""
        super().__init__(cache.allocator)
        self.shared = 0
        self._cache = cache
        self._namespace = _bounded_name(namespace)
        self._owner = owner
        self._tip: _Node | None = None  # of the last shared page
        self._ahead: list[_Node] = []  # what was found behind it at the last look
        self._epoch = cache.epoch  # when its first page came

    @property
    def shares(self) -> bool:
        """False if nothing can be found or inserted any more."""
        return self._cache.enabled and (not self._count or self._epoch == self._cache.epoch)

    def _extend(self, pages: Sequence[int]) -> None:
        if not self._count:
            self._epoch = self._cache.epoch
        super()._extend(pages)

    def peek(self, tokens: NDArray[np.uint32]) -> tuple[int, int]:
        """Pages that `attach` would take, and how many of them somebody holds already. Cheap to ask again."""
        path = self._find(tokens)
        return len(path), bisect_left(path, True, key=lambda node: not self._allocator.holders(node.page))

    def attach(self, tokens: NDArray[np.uint32], written: int) -> int:
        """Hold the cache's pages that follow the shared ones. tokens: [n], from the first on, that may be taken.

        written: rows that the table holds; nothing is found while some of them are its own. Returns the tokens taken.
        """
        before = self.shared
        path = self._find(tokens) if written == before * self._allocator.page_size else []
        for node in path:
            if not self._cache.offers(node, self._owner, self.shared):  # any more
                break
            self._allocator.share(node.page)
            if self.shared < self._count:
                self._allocator.release([int(self._pages[self.shared])])
                self._pages[self.shared] = node.page
            else:
                self._extend([node.page])
            for observer in self._cache.observers:
                observer.page_taken(self._owner, self.shared, node.page)
            self._tip = node
            self.shared += 1
        self._ahead = []
        return (self.shared - before) * self._allocator.page_size

    def publish(self, tokens: NDArray[np.uint32]) -> None:
        """Give full pages to the cache. tokens: [n], committed, from the first on, whose rows have been written.

        Where the cache has a page of the same tokens already, the table holds that one from now on.
        """
        size = self._allocator.page_size
        if len(tokens) // size <= self.shared or not self.shares:
            return
        for key in page_keys(tokens[self.shared * size :], size):
            page = int(self._pages[self.shared])
            node = self._cache.insert(self._namespace, self._tip, key, page)
            if node.page != page:
                self._allocator.share(node.page)
                self._allocator.release([page])
                self._pages[self.shared] = node.page
            for observer in self._cache.observers:
                observer.page_cached(self._owner, self.shared, node.page)
            self._tip = node
            self.shared += 1
        self._ahead = []

    def next_key(self, tokens: NDArray[np.uint32]) -> Hashable | None:
        """Names the page behind the shared ones, equally for all tables that could share it; None if it is not full."""
        size = self._allocator.page_size
        start = self.shared * size
        if not self.shares or start + size > len(tokens):
            return None
        before = self._namespace if self._tip is None else self._tip.page
        return before, tokens[start : start + size].tobytes()

    def truncate(self, tokens: int) -> None:
        """Give back the pages behind those that hold a number of tokens; never shared ones."""
        assert self._allocator.pages_for(tokens) >= self.shared, "committed tokens are not taken back"
        super().truncate(tokens)

    def release(self, *, trusted: bool = True) -> None:
        """Give all pages back. trusted: False if what was shared must not be found again."""
        tip, self._tip = self._tip, None
        self.shared, self._ahead = 0, []
        super().release()
        if tip is not None:
            if trusted:
                self._cache.let_go(tip)
            else:
                self._cache.forget(tip)

    def _find(self, tokens: NDArray[np.uint32]) -> list[_Node]:
        if not self.shares:
            return []
        size, ahead = self._allocator.page_size, self._ahead
        del ahead[max(0, len(tokens) // size - self.shared) :]
        while ahead and not self._cache.knows(ahead[-1]):
            ahead.pop()
        tip, index = ahead[-1] if ahead else self._tip, self.shared + len(ahead)
        ahead += self._cache.find(self._namespace, tip, tokens[index * size :], self._owner, index)
        return ahead


def _bounded_name(namespace: str) -> str:
    """A name for a namespace that can be kept as long as its pages are: clients choose it, and its length."""
    if len(namespace) <= _MAX_NAME_LENGTH:
        return namespace
    return "sha256:" + hashlib.sha256(namespace.encode()).hexdigest()  # longer than those that stay as they are


def page_keys(tokens: NDArray[np.uint32], page_size: int) -> Iterator[bytes]:
    """The bytes of each full page's tokens."""
    assert tokens.dtype == np.uint32
    width = page_size * tokens.itemsize
    for start in range(0, len(tokens), _PAGES_PER_COPY * page_size):
        data = tokens[start : start + _PAGES_PER_COPY * page_size].tobytes()
        for end in range(width, len(data) + 1, width):
            yield data[end - width : end]
