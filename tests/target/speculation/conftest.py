"""A tiny target with a random EAGLE-3 head."""

import pytest

from services.target.kernels.cpu.matrices.weights import Format
from services.target.model import eagle_head_weights
from tests.support.checkpoints.heads import write_pair
from tests.support.target.self_speculation import LAYERS


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of the target and of the head, and the head's config and tensors."""
    return write_pair(tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS)


@pytest.fixture
def exact(monkeypatch):
    """Heads are loaded in float32, the format of their twin."""
    monkeypatch.setattr(eagle_head_weights, "FORMAT", Format.FLOAT32)
