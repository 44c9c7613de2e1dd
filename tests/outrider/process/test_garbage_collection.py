"""Imports with Python's collector off; afterwards it is on again, also after a failed import."""

import gc

import pytest

from outrider.process.garbage_collection import imports_without_gc


def test_the_collector_is_off_during_imports():
    with imports_without_gc():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_failed_imports_turn_the_collector_on_again():
    with pytest.raises(ModuleNotFoundError), imports_without_gc():
        import outrider.nothing  # noqa: F401
    assert gc.isenabled()
