"""Drafts follow the target's weights: which calls the gateway makes, with targets and drafts that the test controls."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.control import draft_weights
from gateway.control.draft_weights import DraftFollower, Goal
from outrider.errors import InvalidRequest, Unavailable
from outrider.wire.v1 import draft_pb2, target_pb2
from tests.support.outrider.uploads import takes_upload

NO_UPDATE, GOAL = Goal(), Goal("/weights/2", "two", "v2")


class Draft:
    """A draft, its link, and the stub of its service in one. folders: that it can load; has: its fingerprint."""

    address, up = "unix:/draft", True

    def __init__(self, *folders, names=("embed", "head")):
        self.folders, self.has = folders, ""
        self.info = draft_pb2.GetDraftInfoResponse(shared_tensors=names)
        self.weights, self.asked, self.content, self.problem = None, [], b"", None
        self.may = asyncio.Event()
        self.may.set()

    async def FlushDraft(self, request, **_):
        await self.may.wait()
        assert request.weights_only
        self.asked.append(request.shared_fingerprint)
        if request.target_folder in self.folders:
            self.has = request.shared_fingerprint
        return draft_pb2.FlushDraftResponse(wants_tensors=self.has != request.shared_fingerprint)

    @takes_upload
    async def UpdateSharedWeights(self, requests, **_):
        parts = [part async for part in requests]
        if self.problem is not None:
            raise self.problem
        if len(parts) < 3:
            raise InvalidRequest("less data was sent than the header states")
        self.has, self.content = parts[0].fingerprint, b"".join(part.content for part in parts)


class Call:
    """A stream of parts, as gRPC's: each iteration goes on where the last one ended. error: after the parts."""

    def __init__(self, parts, error):
        self._iterator = self._all(parts, error)

    @staticmethod
    async def _all(parts, error):
        for part in parts:
            yield part
        if error is not None:
            raise error

    def __aiter__(self):
        return self._iterator

    def cancel(self):
        pass


class Target:
    """A target and its stub. error: after the first part."""

    def __init__(self, fingerprint="two", error=None, up=True):
        self.fingerprint, self.error, self.up, self.address, self.names = fingerprint, error, up, "unix:/target", None

    def GetSharedWeights(self, request, **_):
        self.names = list(request.names)
        parts = [target_pb2.GetSharedWeightsResponse(fingerprint=self.fingerprint, content=b"a")]
        parts += [target_pb2.GetSharedWeightsResponse(content=part) for part in (b"b", b"c")] if not self.error else []
        return Call(parts, self.error)


@pytest.fixture
def follower_of(monkeypatch):
    async def call(link, _, work):
        return await work(link)

    monkeypatch.setattr(draft_weights, "call_replica", call)

    def make(drafts, targets=(), goal=NO_UPDATE):
        return DraftFollower(SimpleNamespace(drafts=drafts, targets=list(targets)), goal)

    return make


async def settled():
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_draft_loads_the_folder_or_gets_the_tensors(follower_of):
    here, elsewhere, alone, target = Draft("/weights/2"), Draft(), Draft(names=()), Target()
    follower = follower_of([here, elsewhere, alone], [Target(up=False), Target("one"), target])
    assert follower.shared_tensors == ["embed", "head"]
    follower.aim(GOAL)
    await settled()
    assert [draft.weights for draft in (here, elsewhere)] == [("v2", "current", "")] * 2
    assert (here.content, elsewhere.content, target.names) == (b"", b"abc", ["embed", "head"])
    assert (alone.asked, alone.weights) == ([], None)


@pytest.mark.parametrize(
    ("targets", "problem", "reason"),
    [
        ([], None, "no target is up"),
        ([Target("three")], None, "other weights by now"),
        ([Target(error=Unavailable("the target is gone"))], None, "the target is gone"),
        ([Target()], InvalidRequest("embed has shape [3]"), "embed has shape [3]"),
    ],
)
async def test_a_draft_that_cannot_take_them_says_so_and_the_next_handshake_tries_again(
    follower_of, targets, problem, reason
):
    draft = Draft()
    draft.problem = problem
    follower = follower_of([draft], targets)
    follower.prepare(draft)
    follower.aim(GOAL)
    await settled()
    assert draft.weights[:2] == ("v2", "stale")
    assert reason in draft.weights.reason
    draft.folders = ["/weights/2"]
    draft.on_ready(draft)
    await settled()
    assert draft.weights == ("v2", "current", "")


async def test_only_the_newest_weights_are_sent(follower_of):
    draft = Draft("/weights/1", "/weights/3")
    draft.may.clear()
    follower = follower_of([draft])
    follower.aim(Goal("/weights/1", "one", "v1"))
    await settled()
    assert draft.weights == ("v1", "loading", "")
    for number in (2, 3):
        follower.aim(Goal(f"/weights/{number}", str(number), f"v{number}"))
    await settled()
    draft.may.set()
    await settled()
    assert draft.asked == ["one", "3"]
    assert draft.weights == ("v3", "current", "")


async def test_a_gateway_that_starts_brings_drafts_to_updated_targets(follower_of):
    draft = Draft()
    follower_of([draft]).prepare(draft)
    draft.on_ready(draft)  # the targets have the weights of their start
    await settled()
    assert draft.asked == []
    follower_of([draft], [Target()], GOAL).prepare(draft)
    draft.on_ready(draft)
    await settled()
    assert draft.has == "two"
