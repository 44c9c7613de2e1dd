"""What tests of the target share."""

import sys

import pytest


@pytest.fixture
def module_cache(tmp_path, monkeypatch):
    """Model code that comes with a checkpoint is copied before its import: not into the user's cache, and afresh."""
    import transformers

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]
