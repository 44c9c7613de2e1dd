"""Membership in a trainer's process group: waits are bounded."""

import time

import pytest
import torch
from safetensors.torch import save_file

from outrider.errors import ConfigError
from services.target.process.weights.group import Announced, TrainerGroup
from services.target.process.weights.groups import TrainerGroups
from services.target.process.weights.member import Membership
from tests.support.gateway.services import free_port
from tests.support.system.trainer import GROUP, Trainer


def test_a_trainer_that_never_comes_is_awaited_for_the_timeout():
    groups = TrainerGroups({"a": (2,)}, {}, torch.device("cpu"), timeout=0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="rank 1 of 2 in group g could not be joined"):
        groups.join(Membership("g", "127.0.0.1", free_port(), 1, 2, "gloo")).result()
    assert time.monotonic() - began < 60  # a process starts, on a busy machine
    with pytest.raises(ConfigError, match="no process group g"):
        groups.receive("g", [Announced("a", "float32", (2,))]).result()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "count", "words"),
    [
        ("long", 6, "4000 bytes, more than the 24"),
        ("short", 1000, "less than the 4000 bytes"),
        ("short", 7, "less than the 28 bytes"),
        ("short", 6, None),
    ],
)
def test_messages_of_another_size_than_announced_are_refused(tmp_path, name, count, words):
    """gloo takes shorter ones, and ends its process for longer ones than it has room for."""
    tensors = {"short": torch.arange(6.0), "long": torch.arange(1000.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    groups, port = TrainerGroups({"a": (count,)}, {}, torch.device("cpu"), timeout=20), free_port()
    trainer = Trainer(port, tmp_path)
    try:
        groups.join(Membership(GROUP, "127.0.0.1", port, 1, 2, "gloo")).result()
        arriving = groups.receive(GROUP, [Announced("a", "float32", (count,))])
        trainer.broadcast([name])
        if words is None:
            assert torch.equal(arriving.result().tensors["a"], tensors[name])
            groups.leave(GROUP).result()
            return
        with pytest.raises(ConfigError, match=f"a did not arrive over group {GROUP}: the trainer sent {words}"):
            arriving.result()
        with pytest.raises(ConfigError, match="no process group"):
            groups.receive(GROUP, [Announced("a", "float32", (count,))]).result()
    finally:
        trainer.kill()


@pytest.mark.long
@pytest.mark.parametrize(("name", "count"), [("long", 6), ("short", 1000)])
def test_no_member_of_a_group_that_passes_messages_on_takes_one_of_another_size(tmp_path, name, count):
    """Of five members, rank 1 passes on to rank 3. Each outlives the message, and a new group works."""
    tensors = {"whole": torch.arange(float(count)), "short": torch.arange(6.0), "long": torch.arange(1000.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    targets = [TrainerGroups({"a": (count,)}, {}, torch.device("cpu"), timeout=20) for _ in range(4)]
    announced = [Announced("a", "float32", (count,))]
    for sound in (False, True):
        port = free_port()
        trainer = Trainer(port, tmp_path, size=5)
        try:
            places = [Membership(GROUP, "127.0.0.1", port, rank, 5, "gloo") for rank in range(1, 5)]
            joining = [target.join(place) for target, place in zip(targets, places, strict=True)]
            for one in joining:
                one.result()
            arriving = [target.receive(GROUP, announced) for target in targets]
            trainer.broadcast(["whole"])
            for one in arriving:
                assert torch.equal(one.result().tensors["a"], tensors["whole"])
            if not sound:
                arriving = [target.receive(GROUP, announced) for target in targets]
                trainer.broadcast([name])
                for one in arriving:
                    with pytest.raises(ConfigError, match=f"a did not arrive over group {GROUP}"):
                        one.result()
        finally:
            trainer.kill()
    for target in targets:
        target.leave(GROUP).result()


def test_a_backend_for_other_devices_is_refused():
    with pytest.raises(ConfigError, match="backend nccl, not gloo"):
        TrainerGroup(Membership("g", "127.0.0.1", 1, 1, 2, "gloo"), torch.device("cuda"), 1.0)


@pytest.mark.parametrize(("dtype", "nbytes"), [("bfloat16", 12), ("float64", 48), ("int8", 6)])
def test_sizes_of_announced_tensors(dtype, nbytes):
    assert Announced("a", dtype, (2, 3)).nbytes == nbytes
    with pytest.raises(ConfigError, match="of type complex64"):
        _ = Announced("a", "complex64", (2, 3)).nbytes
