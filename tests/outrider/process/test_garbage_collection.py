"""What is imported apart from Python's collector; afterwards it is at work again, whatever came of it."""

import gc

import pytest

from outrider.process.garbage_collection import imports_without_gc


def test_the_collector_rests_meanwhile():
    with imports_without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_imports_that_fail_leave_it_at_work():
    with pytest.raises(ModuleNotFoundError), imports_without_gc():
        import outrider.nothing  # noqa: F401
    assert gc.isenabled()
