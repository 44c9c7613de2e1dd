"""Control of several targets as one, with targets that take as long as a test likes."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway import control
from gateway.control import Control
from gateway.facts import Facts
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.wire.v1 import common_pb2, target_pb2


class Target:
    """A target, its link, and the stub of its service in one.

    slow: labels of the weights that it takes over only once it `may`
    """

    def __init__(self, *slow):
        self.slow = slow
        self.may = asyncio.Event()
        self.taken = []
        self.believed = ""  # what the gateway takes it to have

    def weights_changed(self, fingerprint, *, here):
        assert here
        self.believed = fingerprint

    async def UpdateWeightsFromDisk(self, request, **_):
        return await self._take(request.update.weight_version)

    async def UpdateWeightsFromTensor(self, requests, **_):
        versions = [request.update.weight_version async for request in requests]
        return await self._take(versions[0])

    async def _take(self, version):
        if version in self.slow:
            await self.may.wait()
        self.taken.append(version)
        return SimpleNamespace(weights=common_pb2.WeightFacts(weight_version=version, fingerprint=version))


@pytest.fixture
def control_of(monkeypatch):
    async def call(link, _, work):
        return await work(link)

    monkeypatch.setattr(control, "_call", call)
    return lambda *targets, peers=None: Control(
        SimpleNamespace(targets=targets, drafts=[]),
        Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse(), peers or Peers()),
    )


async def settled():
    """Whatever can go on by itself has gone on."""
    for _ in range(100):
        await asyncio.sleep(0)


async def parts(rest=None):
    """rest: what they wait for."""
    yield b"some"
    if rest is not None:
        await rest.wait()
    yield b"more"


def disk(updates, version):
    return updates.update_from_disk("/weights", common_pb2.WeightUpdate(weight_version=version))


def tensors(updates, version, rest=None):
    return updates.update_from_tensors(parts(rest), common_pb2.WeightUpdate(weight_version=version))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("second", [disk, tensors])
@pytest.mark.parametrize("first", [disk, tensors])
def test_all_targets_have_the_weights_of_the_same_update_in_the_end(control_of, tmp_path, first, second, workers):
    """Whichever worker of a gateway is asked."""

    async def scene():
        quick, slow = Target(), Target("1")
        places = [None] if workers == 1 else [Peers(index, workers, tmp_path) for index in range(workers)]
        asked = [control_of(quick, slow, peers=place) for place in places]
        one = asyncio.create_task(first(asked[0], "1"))
        await settled()
        other = asyncio.create_task(second(asked[-1], "2"))
        await settled()
        slow.may.set()
        await asyncio.gather(one, other)
        for target in (quick, slow):
            assert target.taken == ["1", "2"]
            assert target.believed == asked[-1].weight_version == "2"

    asyncio.run(scene())


def test_tensors_that_are_still_coming_hold_up_no_other_update(control_of):
    async def scene():
        target, rest = Target(), asyncio.Event()
        updates = control_of(target)
        slow = asyncio.create_task(tensors(updates, "1", rest))
        await settled()
        await disk(updates, "2")
        rest.set()
        await slow
        assert target.taken == ["2", "1"]
        assert target.believed == updates.weight_version == "1"

    asyncio.run(scene())
