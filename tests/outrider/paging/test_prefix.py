"""Prefix cache: inserted pages are found, shared pages are never written, eviction keeps its order."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import EngineFault
from outrider.paging.allocator import OutOfPages, PageAllocator
from outrider.paging.prefix import PrefixCache, SharedTable


def made(pages=16, page_size=2, **options):
    return PrefixCache(PageAllocator(pages, page_size), **options)


def array(*tokens):
    return np.array(tokens, np.uint32)


def filled(cache, tokens, namespace="", owner=0):
    """A table that has computed these tokens and published its full pages."""
    table = SharedTable(cache, namespace, owner)
    table.attach(tokens, 0)
    table.reserve(len(tokens))
    table.publish(tokens)
    return table


def found(cache, *tokens, namespace=""):
    """The pages that a new table would take."""
    return [node.page for node in cache.find(namespace, None, array(*tokens))]


def audit(cache, tables=()):
    cache.allocator.check(tables=[table.pages.tolist() for table in tables])
    cache.check()


def test_a_later_text_takes_the_pages_that_it_begins_with():
    cache = made()
    first = filled(cache, array(1, 2, 3, 4, 5))
    pages = first.pages.tolist()
    assert (first.shared, len(pages)) == (2, 3)
    second = SharedTable(cache)
    assert found(cache, 1, 2, 3, 9) == pages[:1]
    assert second.attach(array(1, 2, 3, 4, 9, 9), 0) == 4
    assert second.pages.tolist() == pages[:2]
    assert [cache.allocator.holders(page) for page in pages] == [2, 2, 1]
    first.release()
    audit(cache, [second])
    assert cache.allocator.cached_pages == 0
    second.release()
    assert (cache.allocator.leased_pages, cache.allocator.cached_pages, cache.allocator.free_pages) == (0, 2, 16)
    assert SharedTable(cache).attach(array(7, 2, 3, 4), 0) == 0
    audit(cache)


def test_pages_that_were_leased_but_not_written_are_given_for_cached_ones():
    cache = made()
    first = filled(cache, array(1, 2, 3, 4))
    second = SharedTable(cache)
    second.reserve(7)
    assert second.attach(array(1, 2, 3, 4, 5), 0) == 4
    assert second.pages.tolist()[:2] == first.pages.tolist()
    assert (len(second.pages), cache.allocator.leased_pages) == (4, 4)
    audit(cache, [first, second])
    third = SharedTable(cache)
    third.reserve(4)
    assert third.attach(array(1, 2, 3, 4), 1) == 0  # it has written a row of its own
    audit(cache, [first, second, third])


def test_a_page_is_found_behind_its_own_beginning_alone():
    cache = made()
    filled(cache, array(1, 2, 5, 6)).release()
    filled(cache, array(3, 4, 5, 6)).release()
    assert len(cache) == 4
    assert SharedTable(cache).attach(array(5, 6), 0) == 0
    assert found(cache, 1, 2, 5, 6) != found(cache, 3, 4, 5, 6)
    audit(cache)


def test_a_page_computed_twice_is_replaced_by_the_first_one():
    cache = made()
    tables = [SharedTable(cache) for _ in range(3)]
    for table in tables:
        table.reserve(5)
    for table in tables:
        table.publish(array(1, 2, 3, 4, 5))
    assert tables[1].pages.tolist()[:2] == tables[0].pages.tolist()[:2]
    assert cache.allocator.leased_pages == 2 + 3  # and a page of its own for each
    audit(cache, tables)
    for table in tables:
        table.release()
    audit(cache)


def test_namespaces_share_nothing():
    cache = made()
    plain, salted = filled(cache, array(1, 2)), filled(cache, array(1, 2), "adapter")
    assert plain.pages.tolist() != salted.pages.tolist()
    assert SharedTable(cache, "other").attach(array(1, 2), 0) == 0
    assert found(cache, 1, 2, namespace="adapter") == salted.pages.tolist()
    plain.release()
    salted.release()
    cache.evict(2)
    assert not cache.namespaces, "a namespace without pages takes no memory"


def test_eviction_is_least_recently_used_first_and_leaves_first():
    cache = made(pages=6)
    old, new = array(1, 2, 3, 4, 5, 6), array(1, 2, 7, 8)
    filled(cache, old).release()
    filled(cache, new).release()
    lengths = []
    for _ in range(4):
        cache.evict(1)
        audit(cache)
        lengths.append((len(found(cache, *old.tolist())), len(found(cache, *new.tolist()))))
    assert lengths == [(2, 2), (1, 2), (1, 1), (0, 0)]


def test_use_keeps_a_page():
    cache = made(pages=2)
    filled(cache, array(1, 2)).release()
    filled(cache, array(3, 4)).release()
    filled(cache, array(1, 2)).release()
    table = SharedTable(cache)
    table.reserve(1)
    assert (len(found(cache, 1, 2)), len(found(cache, 3, 4))) == (1, 0)


def test_held_pages_are_never_evicted():
    cache = made(pages=4)
    held = filled(cache, array(1, 2, 3, 4))
    filled(cache, array(5, 6)).release()
    other = SharedTable(cache)
    with pytest.raises(OutOfPages):
        other.reserve(5)
    audit(cache, [held])
    assert cache.allocator.cached_pages == 1
    other.reserve(4)
    audit(cache, [held, other])
    assert held.peek(array(1, 2, 3, 4)) == (0, 0)  # it has all of them
    assert found(cache, 1, 2, 3, 4) == held.pages.tolist()


def test_a_flush_forgets_and_takes_nothing_more_from_before():
    cache = made()
    held = filled(cache, array(1, 2, 3, 4))
    filled(cache, array(9, 9)).release()
    cache.flush()
    assert (len(cache), cache.allocator.cached_pages) == (0, 0)
    held.reserve(6)
    held.publish(array(1, 2, 3, 4, 5, 6))
    assert len(cache) == 0
    audit(cache, [held])
    fresh = filled(cache, array(1, 2, 3, 4))
    assert set(fresh.pages.tolist()).isdisjoint(held.pages.tolist())
    held.release()
    audit(cache, [fresh])
    assert held.attach(array(1, 2, 3, 4), 0) == 4  # it starts again, and shares again


def test_a_table_without_pages_shares_after_a_flush_what_comes_then():
    cache = made()
    waiting = SharedTable(cache)
    old = filled(cache, array(1, 2, 3, 4))
    assert waiting.peek(array(1, 2, 3, 4)) == (2, 2)
    cache.flush()
    assert waiting.peek(array(1, 2, 3, 4)) == (0, 0)
    fresh = filled(cache, array(1, 2, 3, 4))
    assert waiting.attach(array(1, 2, 3, 4), 0) == 4
    assert waiting.pages.tolist() == fresh.pages.tolist()
    audit(cache, [old, fresh, waiting])


def test_untrusted_pages_are_not_found_again():
    cache = made()
    good = filled(cache, array(1, 2, 3, 4))
    bad = filled(cache, array(1, 2, 5, 6, 7, 8))
    bad.release(trusted=False)
    assert found(cache, 1, 2, 5, 6) == good.pages.tolist()[:1]
    audit(cache, [good])
    good.release()
    filled(cache, array(4, 4)).release(trusted=False)
    assert len(cache) == 2
    audit(cache)


def test_without_a_cache_pages_are_freed_at_once():
    cache = made(enabled=False)
    table = filled(cache, array(1, 2, 3, 4))
    assert (table.shared, len(cache)) == (0, 0)
    table.release()
    assert cache.allocator.cached_pages == 0
    assert SharedTable(cache).attach(array(1, 2), 0) == 0


class Mirror:
    """Records the content of each cached page, as an observer with its own data does."""

    def __init__(self, texts, page_size):
        self.texts, self.size = texts, page_size
        self.pages = {}

    def of(self, owner, index):
        return self.texts[owner][index * self.size : (index + 1) * self.size].tolist()

    def page_cached(self, owner, index, page):
        assert self.pages.setdefault(page, self.of(owner, index)) == self.of(owner, index)

    def page_offered(self, owner, index, page):
        return page in self.pages

    def page_taken(self, owner, index, page):
        assert self.pages[page] == self.of(owner, index)

    def page_dropped(self, page):
        del self.pages[page]


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["begin", "compute", "draft", "end", "fail", "flush"]), st.integers(0, 4),
              st.integers(0, 12)),
    max_size=60,
)  # fmt: skip
TEXTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=5, max_size=5)


@given(ACTIONS, TEXTS, st.sampled_from([1, 2, 4]))
def test_random_lives_share_the_right_pages_and_keep_the_books(actions, texts, page_size):
    """A pool whose cells hold the path that they were written for: every table reads its own text."""
    cache = made(pages=9, page_size=page_size)
    texts = [array(*text) for text in texts]
    mirror = Mirror(texts, page_size)
    cache.observers.append(mirror)
    cells: dict[int, tuple[int, ...]] = {}
    tables: dict[int, SharedTable] = {}
    waiting = {5 + i: SharedTable(cache) for i in range(5)}  # they look, and never begin
    texts += texts
    computed = dict.fromkeys(range(5), 0)

    def write(table, start, stop, path):
        for position, slot in zip(range(start, stop), table.slots(start, stop).tolist(), strict=True):
            assert slot // page_size not in cache.pages, "a shared page was written"
            cells[slot] = path(position)

    for action, who, count in actions:
        text, table = texts[who].tolist(), tables.get(who)
        try:
            if action == "begin" and table is None:
                tables[who] = SharedTable(cache, "", who)
                computed[who] = tables[who].attach(texts[who][:-1], 0)
            elif action == "compute" and table is not None:
                computed[who] += table.attach(texts[who][:-1], computed[who])
                stop = min(computed[who] + count, len(text))
                table.reserve(stop)
                write(table, computed[who], stop, lambda position, text=text: tuple(text[: position + 1]))
                computed[who] = stop
                table.publish(texts[who][:stop])
            elif action == "draft" and table is not None:
                table.reserve(computed[who] + count)
                write(table, computed[who], computed[who] + count, lambda _: ("draft",))
                table.truncate(computed[who])
            elif action in ("end", "fail") and table is not None:
                tables.pop(who).release(trusted=action == "end")
            elif action == "flush":
                cache.flush()
        except OutOfPages:
            pass
        audit(cache, tables.values())
        for name, one in (tables | waiting).items():  # what was found before is looked at again, and is still right
            pages = found(cache, *texts[name].tolist())[one.shared :] if one.shares else []
            held = sum(cache.allocator.holders(page) > 0 for page in pages)
            assert one.peek(texts[name]) == (len(pages), held)
        assert mirror.pages.keys() == cache.pages
        for name, one in tables.items():
            read = [cells[slot] for slot in one.slots(0, computed[name]).tolist()]
            assert read == [tuple(texts[name][: i + 1].tolist()) for i in range(computed[name])]
    for table in tables.values():
        table.release()
    cache.evict(9)
    assert (len(cache), cache.allocator.cached_pages, cache.queued) == (0, 0, cache.queued)
    assert cache.allocator.free_pages == 9


class Refusing:
    """Withholds certain pages from every table."""

    def __init__(self):
        self.refused = set()

    def page_offered(self, owner, index, page):
        return page not in self.refused

    def page_cached(self, owner, index, page):
        self.refused.discard(page)

    def page_taken(self, owner, index, page):
        assert page not in self.refused

    def page_dropped(self, page):
        self.refused.discard(page)


def test_pages_that_an_observer_withholds_are_computed_and_shared_again():
    cache = made()
    cache.observers.append(observer := Refusing())
    text = array(*range(1, 10))
    filled(cache, text).release()
    second = found(cache, *text.tolist())[1]
    table = SharedTable(cache)
    assert table.peek(text) == (4, 0)
    observer.refused.add(second)  # behind a look that found it
    assert table.attach(text, 0) == 2
    assert table.peek(text) == (0, 0)
    table.reserve(len(text))
    table.publish(text)
    assert table.shared == 4
    assert second in table.pages
    audit(cache, [table])
    other = SharedTable(cache)
    assert other.attach(text, 0) == 8
    audit(cache, [table, other])


def test_the_list_of_leaves_does_not_grow_with_use():
    cache = made()
    for _ in range(1000):
        filled(cache, array(1, 2, 3, 4)).release()
    assert cache.queued < 100
    audit(cache)


def test_the_audit_finds_what_is_wrong_with_shared_pages():
    cache = made()
    tables = [filled(cache, array(1, 2, 3, 4)) for _ in range(2)]
    with pytest.raises(EngineFault, match="2 holders"):
        audit(cache, tables[:1])
    for table in tables:
        table.release()
    cache._leaves.clear()
    with pytest.raises(EngineFault, match="never be evicted"):
        audit(cache)


def test_keys_of_the_next_page_are_equal_for_tables_that_can_share_it():
    cache = made()
    tables = [filled(cache, array(1, 2, 3)) for _ in range(2)]
    keys = [table.next_key(array(1, 2, 3, 4, 5)) for table in tables]
    assert keys[0] == keys[1] is not None
    assert tables[0].next_key(array(1, 2, 3, 5)) != keys[0]
    assert tables[0].next_key(array(1, 2, 3)) is None
    roots = [SharedTable(cache, name).next_key(array(3, 4)) for name in ("", "salt")]
    assert all(a != b for a, b in pairwise([*roots, keys[0]]))


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_long_texts_are_found_whole(page_size):
    cache = made(pages=600, page_size=page_size)
    text = np.random.default_rng(0).integers(0, 9, 500 * page_size + page_size // 2).astype(np.uint32)
    first = filled(cache, text)
    assert first.shared == 500
    assert found(cache, *text.tolist()) == first.pages.tolist()[:500]
    text[300 * page_size] += 1
    assert found(cache, *text.tolist()) == first.pages.tolist()[:300]


def test_long_namespaces_differ_and_have_short_names():
    cache = made()
    names = ["x" * 1000, "x" * 999 + "y", "x" * 64]
    tables = [filled(cache, array(1, 2, 3, 4), name) for name in names]
    assert all(a.pages.tolist() != b.pages.tolist() for a, b in pairwise(tables))
    for name, table in zip(names, tables, strict=True):
        assert SharedTable(cache, name).peek(array(1, 2, 3, 4)) == (2, 2)
        table.release()
    assert max(map(len, cache.namespaces)) < 100
    audit(cache)
