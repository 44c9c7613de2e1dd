"""What a gateway has to say to a draft: at once or later, and what is no longer true of a session left out."""

import asyncio

import numpy as np
import pytest

from gateway.control.control import Control
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.telemetry.metrics import Metrics
from outrider import PROTOCOL_VERSION
from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, FinishReason
from outrider.wire.codec import commits_to_pb
from outrider.wire.features import features_from_pb, features_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2, draft_pb2_grpc


@pytest.fixture
def link():
    return DraftLink("unix:/nowhere", common_pb2.ModelInfo())


def commit(link, *, draft_budget, finish=FinishReason.RUNNING):
    link.commit(
        commits_to_pb([Commit(1, 5, np.array([7], np.uint32), 1, finish_reason=finish, draft_budget=draft_budget)])
    )


def urgent(link):
    """Whether what has gathered leaves at once; takes it."""
    at_once = link.outgoing.is_set
    link.outgoing.clear()
    link.take_frame()
    return at_once


async def test_a_session_s_end_says_nothing_about_the_hints_of_the_next_one(link):
    commit(link, draft_budget=15)
    assert urgent(link)
    commit(link, draft_budget=0, finish=FinishReason.STOP)
    assert urgent(link)
    link.open(common_pb2.OpenSession(session_id=2))
    assert urgent(link)
    link.feed(features_to_pb([FeatureBlock(2, 0, np.zeros((3, 8), np.uint8))]))
    assert urgent(link), "the prompt is read beside the target"


async def test_what_nobody_waits_for_gathers(link):
    commit(link, draft_budget=0)
    assert not urgent(link)
    link.open(common_pb2.OpenSession(session_id=2, drafting_paused=True))
    assert not urgent(link)
    link.open(common_pb2.OpenSession(session_id=3))
    assert urgent(link), "its hints may be wanted"
    await asyncio.sleep(0)


async def test_rows_of_a_session_s_last_run_are_left_out(link):
    """They may lie behind a gap that it was opened again for."""

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
    told = [(block.session_id, block.first) for block in features_from_pb(link.take_frame().features)]
    assert told == [(2, 5), (2, 7), (3, 0), (1, 0)]
    assert (len(link.backlog), link.backlog.nbytes) == (0, 0)


async def test_what_is_flushed_while_a_draft_is_away_is_flushed_before_it_is_used_again(link, monkeypatch):
    """A draft whose stream was lost, and nothing else, still has all that it learned."""
    asked = []

    class Stub:
        def __init__(self, channel):
            pass

        async def GetDraftInfo(self, request, **options):
            return draft_pb2.GetDraftInfoResponse(protocol_version=PROTOCOL_VERSION)

        async def FlushDraft(self, request, **options):
            asked.append(request.only_fed)

    monkeypatch.setattr(draft_pb2_grpc, "DraftServiceStub", Stub)
    control = Control(Orchestrator([], [link], Metrics()), None)
    for only_fed in (True, False, True):
        assert await control.flush_drafts(draft_pb2.FlushDraftRequest(only_fed=only_fed)) == []
    assert asked == []
    for _ in range(2):
        await link.handshake(None)
    assert asked == [False], "all of it, once"


@pytest.mark.parametrize("fed", [True, False])
async def test_a_draft_hears_where_the_target_s_new_weights_are_whenever_it_is_met(link, monkeypatch, fed):
    """It may have been started anew, with the embedding and head of its flags."""
    asked = []

    class Stub:
        def __init__(self, channel):
            pass

        async def GetDraftInfo(self, request, **options):
            features = common_pb2.FeatureSpec(spec_id=1) if fed else None
            return draft_pb2.GetDraftInfoResponse(protocol_version=PROTOCOL_VERSION, features=features)

        async def GetFusion(self, request, **options):
            yield draft_pb2.GetFusionResponse()

        async def FlushDraft(self, request, **options):
            asked.append((request.only_fed, request.target_folder))

    monkeypatch.setattr(draft_pb2_grpc, "DraftServiceStub", Stub)
    control = Control(Orchestrator([], [link], Metrics()), None)
    await link.handshake(None)
    assert asked == []
    await control.flush_target_states("/weights/1")
    await control.flush_target_states("/weights/2")
    await link.handshake(None)
    await link.handshake(None)
    assert asked == [(True, "/weights/2")] * (2 if fed else 1)
    await control.flush_target_states("")  # tensors, which are in no folder
    await link.handshake(None)
    assert asked[-1] == (True, "/weights/2" if fed else "")
