"""Control of several targets, with targets whose duration a test controls."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from gateway.control import calls
from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.errors import Conflict, InvalidRequest
from outrider.wire.v1 import common_pb2, target_pb2
from tests.support.outrider.uploads import takes_upload

NUMBERS = itertools.count()


class Target:
    """A target, its link, and the stub of its service in one.

    slow: versions of the weights that it loads only once `may` is set
    """

    def __init__(self, *slow):
        self.slow = slow
        self.may = asyncio.Event()
        self.taken = []
        self.believed = ""  # the fingerprint that the gateway assumes
        self.here = self.up = True
        self.address = f"unix:/target{next(NUMBERS)}"
        self.update_lock, self.paused = None, None
        self.awaited_version = None

    def expects(self, fingerprint):
        return fingerprint == self.believed

    def weights_changed(self, fingerprint, _, folder, *, here):
        self.believed, self.folder, self.here = fingerprint, folder, here

    async def UpdateWeightsFromDisk(self, request, **_):
        return await self._take(request.update.weight_version)

    @takes_upload
    async def UpdateWeightsFromTensor(self, requests, **_):
        versions = [request.update.weight_version async for request in requests]
        return await self._take(versions[0])

    async def _take(self, version):
        if version in self.slow:
            await self.may.wait()
        before = self.taken[-1] if self.taken else ""
        self.taken.append(version)
        facts = common_pb2.WeightFacts(weight_version=version, fingerprint=version, fingerprint_before=before)
        return SimpleNamespace(weights=facts)


class Piecemeal(Target):
    """A target whose weights are two tensors; each update replaces one: `version:name`."""

    def __init__(self):
        super().__init__()
        self.start()

    def start(self):
        self.weights = {"a": "0", "b": "0"}

    @property
    def fingerprint(self):
        return repr(self.weights)

    async def _take(self, version):
        before = self.fingerprint
        label, name = version.split(":")
        self.weights = self.weights | {name: label}
        facts = common_pb2.WeightFacts(
            weight_version=label, fingerprint=self.fingerprint, fingerprint_before=before,
            whole="0" not in self.weights.values(),
        )  # fmt: skip
        return SimpleNamespace(weights=facts)


@pytest.fixture
def updates_of(monkeypatch):
    async def call(link, _, work):
        return await work(link)

    monkeypatch.setattr(calls, "call_replica", call)
    return lambda *targets, peers=None: (
        Control(
            SimpleNamespace(targets=targets, drafts=[]),
            Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse(), peers or Peers()),
        ).weights
    )


async def settled():
    """Let all coroutines run until they wait."""
    for _ in range(100):
        await asyncio.sleep(0)


async def parts(rest=None):
    """rest: an event that precedes the last part."""
    yield b"some"
    if rest is not None:
        await rest.wait()
    yield b"more"


def disk(updates, version):
    return updates.update_from_disk("/weights", common_pb2.WeightUpdate(weight_version=version))


def tensors(updates, version, rest=None):
    return updates.update_from_tensors(parts(rest), common_pb2.WeightUpdate(weight_version=version))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("first", "second"), [(disk, disk), (disk, tensors), (tensors, disk)])
def test_concurrent_updates_leave_the_same_weights_on_all_targets(updates_of, tmp_path, first, second, workers):
    """On any worker of a gateway."""

    async def scene():
        quick, slow = Target(), Target("1")
        places = [None] if workers == 1 else [Peers(index, workers, tmp_path) for index in range(workers)]
        asked = [updates_of(quick, slow, peers=place) for place in places]
        one = asyncio.create_task(first(asked[0], "1"))
        await settled()
        other = asyncio.create_task(second(asked[-1], "2"))
        await settled()
        slow.may.set()
        await asyncio.gather(one, other)
        for target in (quick, slow):
            assert target.taken == ["1", "2"]
            assert target.believed == asked[-1].version == "2"

    asyncio.run(scene())


@pytest.mark.parametrize("workers", [1, 2])
def test_one_upload_at_a_time(updates_of, tmp_path, workers):
    """The targets keep all tensors in memory until they are whole."""

    async def scene():
        target, rest = Target(), asyncio.Event()
        places = [None] if workers == 1 else [Peers(index, workers, tmp_path) for index in range(workers)]
        asked = [updates_of(target, peers=place) for place in places]
        slow = asyncio.create_task(tensors(asked[0], "1", rest))
        await settled()
        with pytest.raises(Conflict, match="another update"):
            await tensors(asked[-1], "2")
        rest.set()
        await slow
        await tensors(asked[-1], "3")
        assert target.taken == ["1", "3"]

    asyncio.run(scene())


def test_an_endless_upload_ends_with_its_last_target_or_in_silence(updates_of, monkeypatch):
    async def scene():
        sent = 0

        async def endless():
            nonlocal sent
            while True:
                await asyncio.sleep(0)
                sent += 1
                yield b"more"

        class Refusing(Target):
            @takes_upload
            async def UpdateWeightsFromTensor(self, requests, **_):
                async for _ in requests:
                    if sent:
                        raise InvalidRequest("a gap")

        updates = updates_of(Refusing(), Refusing())
        with pytest.raises(InvalidRequest, match="a gap"):
            await updates.update_from_tensors(endless(), common_pb2.WeightUpdate())
        assert sent < 50
        monkeypatch.setattr(calls, "_SILENCE", 0.05)
        with pytest.raises(InvalidRequest, match="no more tensors arrived"):
            await tensors(updates_of(Target()), "1", asyncio.Event())

    asyncio.run(scene())


def test_the_answer_comes_once_the_targets_are_used(updates_of):
    """A target that was refused for its old weights repeats the handshake first."""

    async def scene():
        target = Target()
        target.up = False
        updates = updates_of(target)
        update = asyncio.create_task(disk(updates, "1"))
        await asyncio.sleep(0.05)
        assert target.taken == ["1"]
        assert not update.done()
        target.up = True
        assert (await update).unused == []

    asyncio.run(scene())


def test_a_slow_upload_does_not_block_other_updates(updates_of):
    async def scene():
        target, rest = Target(), asyncio.Event()
        updates = updates_of(target)
        slow = asyncio.create_task(tensors(updates, "1", rest))
        await settled()
        await disk(updates, "2")
        rest.set()
        await slow
        assert target.taken == ["2", "1"]
        assert target.believed == updates.version == "1"

    asyncio.run(scene())


@pytest.mark.parametrize("count", [1, 2])
def test_a_target_with_mixed_weights_is_unused_until_it_has_all(updates_of, count):
    async def scene():
        targets = [Piecemeal() for _ in range(count)]
        for target in targets:
            target.believed = target.fingerprint
        updates = updates_of(*targets)
        assert (await tensors(updates, "1:a")).unused == []
        targets[-1].start()  # restarts with the weights of its flags
        assert (await tensors(updates, "1:b")).unused == [targets[-1].address]
        assert all(target.here for target in targets[:-1])
        for target in targets[:-1]:
            assert target.fingerprint == target.believed
        assert targets[-1].fingerprint != targets[-1].believed
        assert (await tensors(updates, "1:a")).unused == []
        for target in targets:
            assert target.here
            assert target.fingerprint == target.believed

    asyncio.run(scene())
