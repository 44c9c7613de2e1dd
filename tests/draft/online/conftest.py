"""A target and a draft of it, which learn the same text."""

import pytest

from tests.support.draft.online import write_pair
from tests.support.invariance.engines import target_engine


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def target(models):
    return target_engine(models[0], max_step_tokens=16)
