"""Prefix cache: full pages of committed tokens, shared by the sessions that begin with the same tokens.

A page of keys and values depends only on the tokens up to its end, so the cache is a tree: a node is a page, and its
children are the following pages, looked up by their tokens themselves. Different texts therefore never collide.

    namespace ─── page 0 ─┬─ page 1 ─── page 2      a path is the beginning of a text
                          └─ page 1'

    lookup    when a session is admitted, and while its prompt is computed: the session holds and reads found pages
    insertion when a page is full of committed tokens: the cache keeps it, the session still holds it
    eviction  of pages without holders, when room is needed: least recently used first, leaves before their parents

Only full pages of committed tokens are shared; a session writes into pages of its own after them, so no page is ever
copied. Sessions hold whole paths, so no page below a page without holders is held.
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left
from collections.abc import Hashable, Iterator, KeysView, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.errors import EngineFault
from outrider.paging.allocator import NULL_PAGE, PageAllocator
from outrider.paging.table import PageTable

_MAX_NAME_LENGTH = 64  # characters of a namespace
_PAGES_PER_COPY = 64  # pages whose tokens are copied to bytes at once for the lookup


class PageObserver(Protocol):
    """Keeps data beside cached pages, such as hidden states. Called in the engine thread.

    owner: id of the table's session; index: index of the page in the table, which holds tokens from index * page_size
    on
    """

    def page_cached(self, owner: int, index: int, page: int) -> None:
        """The cache keeps a page of an owner's table; it is the cache's older page if the cache had these tokens."""
        ...

    def page_offered(self, owner: int, index: int, page: int) -> bool:
        """False if an owner must compute a cached page itself."""
        ...

    def page_taken(self, owner: int, index: int, page: int) -> None:
        """An owner's table took a cached page instead of computing it."""
        ...

    def page_dropped(self, page: int) -> None:
        """The cache no longer keeps a page; its holders keep it for themselves."""
        ...


class _Node:
    """A cached page. key: the bytes of its tokens, or of a root's namespace; used: time of the last release."""

    __slots__ = ("children", "key", "page", "parent", "used")

    def __init__(self, page: int, key: bytes, parent: _Node | None) -> None:
        self.page = page
        self.key = key
        self.parent = parent
        self.children: dict[bytes, _Node] = {}
        self.used = 0


class PrefixCache:
    """One tree for each namespace. Texts of different namespaces (adapters, tenants) never share a page."""

    def __init__(self, allocator: PageAllocator, *, enabled: bool = True) -> None:
        """Sets the allocator's `reclaim`. enabled: False finds and inserts nothing."""
        self.allocator = allocator
        self.enabled = enabled
        self.observers: list[PageObserver] = []
        self.epoch = 0  # number of flushes; tables from before a flush share no further pages
        self._roots: dict[str, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by page
        self._leaves: list[tuple[int, int, _Node]] = []  # heap of (used, order, node); may hold outdated entries
        self._clock = 0
        allocator.reclaim = self.evict

    def __len__(self) -> int:
        """Number of pages in the cache, held or not."""
        return len(self._nodes)

    @property
    def pages(self) -> KeysView[int]:
        """Ids of the pages in the cache, held or not."""
        return self._nodes.keys()

    @property
    def namespaces(self) -> KeysView[str]:
        """Names of the trees."""
        return self._roots.keys()

    @property
    def queued(self) -> int:
        """Number of entries in the queue of eviction, outdated ones included."""
        return len(self._leaves)

    def knows(self, node: _Node) -> bool:
        """True if a node is still in its tree, and so are its ancestors."""
        return self._nodes.get(node.page) is node

    def find(
        self, namespace: str, tip: _Node | None, tokens: NDArray[np.uint32], owner: int = 0, index: int = 0
    ) -> list[_Node]:
        """The cached path after a node, or after the namespace's root, along the tokens that follow it.

        The path ends at the first page that the owner must compute itself. index: of the path's first page in the
        owner's table
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
        """True if an owner's table may take a cached page at an index."""
        return all(observer.page_offered(owner, index, node.page) for observer in self.observers)

    def insert(self, namespace: str, tip: _Node | None, key: bytes, page: int) -> _Node:
        """The child of a node, or of the namespace's root, for these tokens; created from `page` if it is new."""
        parent = tip or self._roots.setdefault(namespace, _Node(NULL_PAGE, namespace.encode(), None))
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = self._nodes[page] = _Node(page, key, parent)
            self.allocator.keep(page)
        return node

    def release(self, tip: _Node) -> None:
        """Record that a table whose last shared page is this node has released its pages."""
        if self.knows(tip):
            self._clock += 1
            tip.used = self._clock
            self._offer(tip)

    def evict(self, count: int) -> None:
        """Drop a number of pages without holders, least recently used first, leaves before their parents."""
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
        """Drop an untrusted path from its end up to the first page with other holders or children."""
        node: _Node | None = tip
        while node is not None and self._evictable(node):
            self._drop(node)
            node = node.parent

    def flush(self) -> None:
        """Drop all pages, for example after a change of weights. Sessions keep the pages that they hold."""
        self.epoch += 1
        nodes = list(self._nodes)
        self._nodes.clear()
        self._roots.clear()
        self._leaves.clear()
        for page in nodes:
            self.allocator.drop(page)
            self._notify_dropped(page)

    def check(self) -> None:
        """Audit the trees against the allocator. Raises EngineFault."""
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
        unleased = sum(not self.allocator.holders(page) for page in self._nodes)
        if unleased != self.allocator.cached_pages:
            raise EngineFault(f"page audit: {self.allocator.cached_pages} pages are cached, the trees have {unleased}")

    def _evictable(self, node: _Node) -> bool:
        return self.knows(node) and not node.children and not self.allocator.holders(node.page)

    def _offer(self, node: _Node) -> None:
        """Queue a node for eviction if it can be evicted now; if not, a later release or eviction queues it."""
        if not self._evictable(node):
            return
        if len(self._leaves) > 2 * len(self._nodes) + 64:  # most entries are outdated
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
    """A page table whose first pages may be shared with the cache; the pages after them are its own.

    pages   0 ...... shared-1 | shared ........
            read only         | written
    """

    def __init__(self, cache: PrefixCache, namespace: str = "", owner: int = 0) -> None:
        """owner: id that the cache's observers receive."""
        super().__init__(cache.allocator)
        self.shared = 0
        self._cache = cache
        self._namespace = _bounded_name(namespace)
        self._owner = owner
        self._tip: _Node | None = None  # node of the last shared page
        self._ahead: list[_Node] = []  # nodes found after it by the last lookup
        self._epoch = cache.epoch  # the cache's epoch at the first page

    @property
    def shares(self) -> bool:
        """False if the table can neither find nor insert pages any more."""
        return self._cache.enabled and (not self._count or self._epoch == self._cache.epoch)

    def _extend(self, pages: Sequence[int]) -> None:
        if not self._count:
            self._epoch = self._cache.epoch
        super()._extend(pages)

    def peek(self, tokens: NDArray[np.uint32]) -> tuple[int, int]:
        """Number of pages that `attach` would take, and how many of them have holders. Repeated calls are cheap."""
        path = self._find(tokens)
        return len(path), bisect_left(path, True, key=lambda node: not self.allocator.holders(node.page))

    def attach(self, tokens: NDArray[np.uint32], written: int) -> int:
        """Take cached pages after the shared ones. tokens: [n], from the first one on, whose pages may be taken.

        written: tokens whose KV the table holds; pages are taken only if all of them are shared. Returns the number of
        tokens taken.
        """
        before = self.shared
        path = self._find(tokens) if written == before * self.allocator.page_size else []
        for node in path:
            if not self._cache.offers(node, self._owner, self.shared):  # an observer may have changed its answer
                break
            self.allocator.share(node.page)
            if self.shared < self._count:
                self.allocator.release([int(self._pages[self.shared])])
                self._pages[self.shared] = node.page
            else:
                self._extend([node.page])
            for observer in self._cache.observers:
                observer.page_taken(self._owner, self.shared, node.page)
            self._tip = node
            self.shared += 1
        self._ahead = []
        return (self.shared - before) * self.allocator.page_size

    def publish(self, tokens: NDArray[np.uint32]) -> None:
        """Give full pages to the cache. tokens: [n], committed, from the first one on, whose KV has been written.

        If the cache already has a page of the same tokens, the table holds that page from now on.
        """
        size = self.allocator.page_size
        if len(tokens) // size <= self.shared or not self.shares:
            return
        for key in page_keys(tokens[self.shared * size :], size):
            page = int(self._pages[self.shared])
            node = self._cache.insert(self._namespace, self._tip, key, page)
            if node.page != page:
                self.allocator.share(node.page)
                self.allocator.release([page])
                self._pages[self.shared] = node.page
            for observer in self._cache.observers:
                observer.page_cached(self._owner, self.shared, node.page)
            self._tip = node
            self.shared += 1
        self._ahead = []

    def next_key(self, tokens: NDArray[np.uint32]) -> Hashable | None:
        """Key of the page after the shared ones, equal for all tables that can share it; None if it is not full."""
        size = self.allocator.page_size
        start = self.shared * size
        if not self.shares or start + size > len(tokens):
            return None
        before = self._namespace if self._tip is None else self._tip.page
        return before, tokens[start : start + size].tobytes()

    def truncate(self, tokens: int) -> None:
        """Release the pages after those of the first `tokens` tokens. Shared pages are never released here."""
        assert self.allocator.pages_for(tokens) >= self.shared, "shared pages hold committed tokens"
        super().truncate(tokens)

    def release(self, *, trusted: bool = True) -> None:
        """Release all pages. trusted: False also removes the shared pages from the cache."""
        tip, self._tip = self._tip, None
        self.shared, self._ahead = 0, []
        super().release()
        if tip is not None:
            if trusted:
                self._cache.release(tip)
            else:
                self._cache.forget(tip)

    def _find(self, tokens: NDArray[np.uint32]) -> list[_Node]:
        if not self.shares:
            return []
        size, ahead = self.allocator.page_size, self._ahead
        del ahead[max(0, len(tokens) // size - self.shared) :]
        while ahead and not self._cache.knows(ahead[-1]):
            ahead.pop()
        tip, index = ahead[-1] if ahead else self._tip, self.shared + len(ahead)
        ahead += self._cache.find(self._namespace, tip, tokens[index * size :], self._owner, index)
        return ahead


def _bounded_name(namespace: str) -> str:
    """A name of bounded length for a namespace, because clients choose namespaces and the cache keeps them."""
    if len(namespace) <= _MAX_NAME_LENGTH:
        return namespace
    # Longer than any unchanged name, so it equals none of them.
    return "sha256:" + hashlib.sha256(namespace.encode()).hexdigest()


def page_keys(tokens: NDArray[np.uint32], page_size: int) -> Iterator[bytes]:
    """The tokens of each full page, as bytes."""
    assert tokens.dtype == np.uint32
    width = page_size * tokens.itemsize
    for start in range(0, len(tokens), _PAGES_PER_COPY * page_size):
        data = tokens[start : start + _PAGES_PER_COPY * page_size].tobytes()
        for end in range(width, len(data) + 1, width):
            yield data[end - width : end]
