"""The handshake with a target: registration of the hidden states that drafts need."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from gateway.orchestration.orchestrator import Orchestrator
from gateway.sessions.request import GenerationRequest, StopOptions
from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.draft import DraftLink
from gateway.streams.features import Features
from gateway.streams.pool_weights import OtherWeights, PoolWeights
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider import PROTOCOL_VERSION
from outrider.errors import Unavailable
from outrider.speculation.sampling import SamplingParams
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.support.outrider.uploads import takes_upload


@pytest.fixture
def target(monkeypatch):
    """The stub of a target: `configured` are ids of specifications; it answers once `may` is set."""
    found = SimpleNamespace(configured=[], may=asyncio.Event())

    class Stub:
        def __init__(self, channel):
            pass

        async def GetTargetInfo(self, request, **options):
            return target_pb2.GetTargetInfoResponse(protocol_version=PROTOCOL_VERSION)

        @takes_upload
        async def ConfigureFeatures(self, parts, **options):
            found.configured += [part.spec.spec_id async for part in parts if part.HasField("spec")]
            await found.may.wait()

    monkeypatch.setattr(target_pb2_grpc, "TargetServiceStub", Stub)
    return found


class Updatable:
    """A target's stub that loads folders: `folders` by path; `asked` are the updates that it was sent."""

    def __init__(self, fingerprint, folders=()):
        self.folders, self.asked = dict(folders), []
        model = common_pb2.ModelInfo(fingerprint=fingerprint)
        self.info = target_pb2.GetTargetInfoResponse(
            protocol_version=PROTOCOL_VERSION, model=model, first_fingerprint="first", weight_version="old"
        )

    async def GetTargetInfo(self, request, **options):
        return self.info

    async def UpdateWeightsFromDisk(self, request, **options):
        self.asked.append((request.folder, request.fingerprint, request.replaced_fingerprint))
        if self.folders.get(request.folder) != request.fingerprint:
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="no such folder")
        self.info.model.fingerprint = request.fingerprint
        self.info.weight_version = request.update.weight_version


@pytest.mark.parametrize(("present", "folder", "folders", "loads"), [
    ("first", "/w/2", {"/w/2": "two"}, True),
    ("one", "/w/2", {"/w/2": "two"}, True),  # it missed one update
    ("first", "/w/2", {"/w/2": "three"}, False),  # its files were replaced
    ("first", "/w/2", {}, False),
    ("first", "", {}, None),  # tensors
    ("newer", "/w/2", {"/w/2": "two"}, None),  # another gateway may have sent them
])  # fmt: skip
async def test_a_target_gets_the_weights_that_it_lacks(monkeypatch, present, folder, folders, loads):
    stub, link = Updatable(present, folders), TargetLink("unix:/nowhere")
    monkeypatch.setattr(target_pb2_grpc, "TargetServiceStub", lambda channel: stub)
    link.tokenizer.files = {"config.json": b"{}"}
    link.expect(PoolWeights(Updatable("first").info))
    link.weights_changed("one", "1", "/w/1")
    link.weights_changed("two", "2", folder)
    if loads:
        assert (await link.handshake(None)).weight_version == "2"
    else:
        with pytest.raises(OtherWeights, match='awaits the weights "2"') as caught:
            await link.handshake(None)
        assert "/w/2" not in caught.value.message, "clients see the reason in /health"
        assert link.state_after(caught.value) is ReplicaState.AWAITING_WEIGHTS
    assert stub.asked == ([] if loads is None else [("/w/2", "two", present)])


async def test_sessions_end_at_once_if_no_target_has_the_weights():
    """They would wait in vain; those of a pool with a target that may come back go on waiting."""
    links = [TargetLink("unix:/a"), TargetLink("unix:/b")]
    sessions = Orchestrator(links, [], Metrics()).sessions
    request = GenerationRequest([5], SamplingParams(0.0), StopOptions(1))
    for link in links:
        link.expect(PoolWeights(Updatable("first").info))
        link.weights_changed("two", "2")
    session = sessions.open(request)
    for link, ended in ((links[0], False), (links[1], True)):
        link.absence.set(Availability(ReplicaState.AWAITING_WEIGHTS, "it lacks them"))
        link.events.absent()
        assert (session.id not in sessions.by_id) is ended
    for work in (session.inbox.next(), asyncio.to_thread(sessions.open, request)):
        with pytest.raises(Unavailable, match='no target has the weights "2"'):
            await work


def states(spec_id):
    return Features(common_pb2.FeatureSpec(spec_id=spec_id), [b"fusion"])


def a_draft(address, spec_id):
    link = DraftLink(address, common_pb2.ModelInfo())
    link.features = states(spec_id)
    return link


async def settled():
    """Let all coroutines run until they wait."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_a_draft_may_connect_while_a_target_is_configured(target):
    link = TargetLink("unix:/nowhere")
    link.tokenizer.files = {"config.json": b"{}"}
    for spec_id in (1, 2):
        await link.configure(states(spec_id))
    link.channel = object()
    handshake = asyncio.create_task(link.handshake(link.channel))
    await settled()
    draft = asyncio.create_task(link.configure(states(3)))
    await settled()
    assert target.configured == [1, 3]
    target.may.set()
    await asyncio.gather(handshake, draft)
    assert sorted(target.configured) == [1, 2, 3]
    assert link.features.known == {1, 2, 3}


async def test_unused_features_are_dropped(target):
    """Of a head that is replaced repeatedly, only the last fusion is kept and sent to a target that comes back."""
    link, drafts = TargetLink("unix:/nowhere"), [a_draft("unix:/a", 1), a_draft("unix:/b", 2)]
    link.tokenizer.files = {"config.json": b"{}"}
    link.channel = object()
    target.may.set()
    Orchestrator([link], drafts, Metrics())
    await drafts[0].before_up()
    for spec_id in range(2, 12):
        drafts[1].features = states(spec_id)
        await drafts[1].before_up()
    assert target.configured == list(range(1, 12))
    assert link.features.known == {1, 11}
    target.configured.clear()
    await link.handshake(link.channel)
    assert target.configured == [1, 11]
