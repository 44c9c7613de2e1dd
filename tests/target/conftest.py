"""What tests of the target share."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def module_cache(tmp_path_factory):
    """Model code that comes with a checkpoint is copied before its import: not into the user's cache.

    One place for all tests, since the parent of all such modules is imported only once.
    """
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        yield
