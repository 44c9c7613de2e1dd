"""Membership in a trainer's process group: waits are bounded."""

import time

import pytest
import torch

from outrider.errors import ConfigError
from services.target.process.weights.group import Announced, Membership, TrainerGroup
from services.target.process.weights.groups import TrainerGroups
from tests.support.gateway.services import free_port


def test_a_trainer_that_never_comes_is_awaited_for_the_timeout():
    groups = TrainerGroups({"a": (2,)}, {}, torch.device("cpu"), timeout=0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="rank 1 of 2 in group g could not be joined"):
        groups.join(Membership("g", "127.0.0.1", free_port(), 1, 2, "gloo")).result()
    assert time.monotonic() - began < 10
    with pytest.raises(ConfigError, match="no process group g"):
        groups.receive("g", [Announced("a", "float32", (2,))]).result()


def test_a_backend_for_other_devices_is_refused():
    with pytest.raises(ConfigError, match="backend nccl, not gloo"):
        TrainerGroup(Membership("g", "127.0.0.1", 1, 1, 2, "gloo"), torch.device("cuda"), 1.0)


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 12), ("float64", 48), ("int8", 6)])
def test_sizes_of_announced_tensors(dtype, nbytes):
    assert Announced("a", dtype, (2, 3)).nbytes == nbytes
    with pytest.raises(ConfigError, match="of type complex64"):
        _ = Announced("a", "complex64", (2, 3)).nbytes
