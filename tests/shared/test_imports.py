"""What is imported apart from Python's collector is spared by it afterwards, and all else is collected as ever."""

import gc

import pytest

from outrider.imports import uncollected_imports


def test_the_collector_rests_meanwhile_and_leaves_out_what_came():
    frozen = gc.get_freeze_count()
    try:
        with uncollected_imports():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_imports_that_fail_leave_it_at_work():
    with pytest.raises(ModuleNotFoundError), uncollected_imports():
        import outrider.nothing  # noqa: F401
    assert gc.isenabled()
    gc.unfreeze()
