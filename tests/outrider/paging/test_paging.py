"""Pages: the audit passes after random leases and releases; tables never share a slot by accident."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import EngineFault
from outrider.paging.allocator import NULL_PAGE, OutOfPages, PageAllocator
from outrider.paging.table import PageTable

VERBS = {"reserve": PageTable.reserve, "truncate": PageTable.truncate, "release": lambda table, _: table.release()}
ACTIONS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(sorted(VERBS)), st.integers(0, 40)))


@given(ACTIONS, st.sampled_from([1, 3, 16]))
def test_random_leases_pass_the_audit(actions, page_size):
    allocator = PageAllocator(24, page_size)
    tables = [PageTable(allocator) for _ in range(5)]
    for who, action, tokens in actions:
        table = tables[who]
        before = table.pages.tolist()
        try:
            VERBS[action](table, tokens)
        except OutOfPages:
            assert table.pages.tolist() == before
        if action == "reserve" and table.capacity >= tokens:
            assert table.pages.tolist()[: len(before)] == before
        allocator.check(expected_leased=sum(len(t.pages) for t in tables))
        slots = np.concatenate([t.slots(0, t.capacity) for t in tables])
        assert len(np.unique(slots)) == len(slots)
        assert not np.any(slots // page_size == NULL_PAGE)
    for table in tables:
        table.release()
    allocator.check(expected_leased=0)
    assert allocator.free_pages == 24


def test_slots_follow_positions():
    allocator = PageAllocator(4, 4)
    first, second = PageTable(allocator), PageTable(allocator)
    first.reserve(3)
    second.reserve(1)
    first.reserve(6)
    pages = first.pages.tolist()
    assert first.slots(2, 6).tolist() == [pages[0] * 4 + 2, pages[0] * 4 + 3, pages[1] * 4, pages[1] * 4 + 1]
    first.truncate(4)
    assert first.pages.tolist() == pages[:1]


def test_the_audit_finds_wrong_counts():
    allocator = PageAllocator(4, 4)
    pages = allocator.lease(2)
    with pytest.raises(EngineFault):
        allocator.check(expected_leased=1)
    allocator.release(pages)
    with pytest.raises(EngineFault, match="not leased"):
        allocator.release(pages[:1])
    allocator._free.append(1)
    with pytest.raises(EngineFault):
        allocator.check()
