"""Messages to a draft: sent at once or gathered, without hidden states of a session's last run."""

import asyncio

import numpy as np
import pytest

from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.telemetry.metrics import Metrics
from outrider import PROTOCOL_VERSION
from outrider.config import GatewayConfig
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, FinishReason
from outrider.wire.codec import commits_to_pb
from outrider.wire.features import features_from_pb, features_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2


@pytest.fixture
def link():
    return DraftLink("unix:/nowhere", common_pb2.ModelInfo())


def commit(link, *, draft_budget, finish=FinishReason.RUNNING):
    link.commit(
        commits_to_pb([Commit(1, 5, np.array([7], np.uint32), 1, finish_reason=finish, draft_budget=draft_budget)])
    )


def urgent(link):
    """True if the waiting messages are due at once; takes them."""
    at_once = link.stream.outgoing.is_set
    link.stream.outgoing.clear()
    link.take_frame()
    return at_once


async def test_the_end_of_a_session_does_not_pause_drafting(link):
    commit(link, draft_budget=15)
    assert urgent(link)
    commit(link, draft_budget=0, finish=FinishReason.STOP)
    assert urgent(link)
    link.open(common_pb2.OpenSession(session_id=2))
    assert urgent(link)
    link.feed(features_to_pb([FeatureBlock(2, 0, np.zeros((3, 8), np.uint8))]))
    assert urgent(link), "the prompt is read beside the target"


async def test_messages_are_gathered_while_drafting_is_paused(link):
    commit(link, draft_budget=0)
    assert not urgent(link)
    link.open(common_pb2.OpenSession(session_id=2, drafting_paused=True))
    assert not urgent(link)
    link.open(common_pb2.OpenSession(session_id=3))
    assert urgent(link), "it may need draft tokens"
    await asyncio.sleep(0)


async def test_states_of_a_session_s_last_run_are_dropped(link):
    """They may follow the gap because of which the session was opened again."""

    def feed(*blocks):
        rows = [FeatureBlock(name, first, np.full((2, 8), name, np.uint8)) for name, first in blocks]
        assert link.feed(features_to_pb(rows))

    feed((1, 30), (2, 5))
    feed((1, 32))
    feed((2, 7), (1, 34), (3, 0))
    before = link.backlog.nbytes
    link.open(common_pb2.OpenSession(session_id=1))
    assert before - link.backlog.nbytes == 3 * 2 * 8
    feed((1, 0))
    blocks = [(block.session_id, block.first) for block in features_from_pb(link.take_frame().features)]
    assert blocks == [(2, 5), (2, 7), (3, 0), (1, 0)]
    assert (len(link.backlog), link.backlog.nbytes) == (0, 0)


async def test_a_flush_while_a_draft_is_away_precedes_its_next_use(link, monkeypatch):
    """A draft that lost only its stream still has its caches."""
    asked = []

    class Stub:
        def __init__(self, channel):
            pass

        async def GetDraftInfo(self, request, **options):
            return draft_pb2.GetDraftInfoResponse(protocol_version=PROTOCOL_VERSION)

        async def FlushDraft(self, request, **options):
            asked.append(request.only_fed)

    monkeypatch.setattr(draft_pb2_grpc, "DraftServiceStub", Stub)
    control = Control(Orchestrator([], [link], Metrics()), Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse()))
    for only_fed in (True, False, True):
        assert await control.services.flush_drafts(draft_pb2.FlushDraftRequest(only_fed=only_fed)) == []
    assert asked == []
    for _ in range(2):
        await link.handshake(None)
    assert asked == [False], "all of it, once"
