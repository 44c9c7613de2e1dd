"""An address beside which a socket can be."""

import pytest


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/service.sock"
