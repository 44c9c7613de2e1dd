"""The handshake with a target: registration of the hidden states that drafts need."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.features import Features
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider import PROTOCOL_VERSION
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc


@pytest.fixture
def target(monkeypatch):
    """The stub of a target: `configured` are ids of specifications; it answers once `may` is set."""
    found = SimpleNamespace(configured=[], may=asyncio.Event())

    class Stub:
        def __init__(self, channel):
            pass

        async def GetTargetInfo(self, request, **options):
            return target_pb2.GetTargetInfoResponse(protocol_version=PROTOCOL_VERSION)

        async def ConfigureFeatures(self, parts, **options):
            found.configured += [part.spec.spec_id async for part in parts if part.HasField("spec")]
            await found.may.wait()

    monkeypatch.setattr(target_pb2_grpc, "TargetServiceStub", Stub)
    return found


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
    link.tokenizer_files = {"config.json": b"{}"}
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
    assert link.features == {1, 2, 3}


async def test_unused_features_are_dropped(target):
    """Of a head that is replaced repeatedly, only the last fusion is kept and sent to a target that comes back."""
    link, drafts = TargetLink("unix:/nowhere"), [a_draft("unix:/a", 1), a_draft("unix:/b", 2)]
    link.tokenizer_files = {"config.json": b"{}"}
    link.channel = object()
    target.may.set()
    Orchestrator([link], drafts, Metrics())
    await drafts[0].before_up()
    for spec_id in range(2, 12):
        drafts[1].features = states(spec_id)
        await drafts[1].before_up()
    assert target.configured == list(range(1, 12))
    assert link.features == {1, 11}
    target.configured.clear()
    await link.handshake(link.channel)
    assert target.configured == [1, 11]
