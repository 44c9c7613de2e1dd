"""A target and a draft of it, which learn the same text."""

import pytest

from tests.support.draft.online import write_pair


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("models"))
