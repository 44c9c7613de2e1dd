"""The inputs that the fuzzers have found, and their seeds, replayed: none is a fault."""

import importlib
import logging

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.targets import TARGETS


@pytest.fixture(autouse=True)
def _silent():
    """Refused inputs are logged, and there are many."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS)
def test_no_kept_input_is_a_fault(target):
    module = importlib.import_module(f"tests.fuzz.targets.{target}")
    kept = sorted((CORPUS / target).iterdir())
    assert kept, "the corpus is empty"
    for content in [*module.seeds(), *(file.read_bytes() for file in kept)]:
        module.fuzz(content)
