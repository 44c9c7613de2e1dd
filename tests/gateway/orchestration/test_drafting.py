"""The relay of proposals."""

import logging

import numpy as np
import pytest

from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.speculation.proposal import Proposal
from outrider.wire import codec
from outrider.wire.v1 import common_pb2, draft_pb2
from tests.support.gateway.requests import request_for


def proposals_of(session_id):
    nodes = np.array([7, 8], np.uint32), np.array([-1, 0], np.int32), np.array([-0.1, -0.2], np.float32)
    return codec.proposals_to_pb([Proposal(session_id, 3, 99, *nodes, 3)])


def broken():
    """Proposals of session 1 that cannot be decoded, each for another reason."""
    for field in common_pb2.ProposalBatch.DESCRIPTOR.fields_by_name:
        for cut in (1, 4):
            batch = proposals_of(1)
            setattr(batch, field, getattr(batch, field)[:-cut])
            yield pytest.param(batch, id=f"{field}-{cut}")
    batch = proposals_of(1)
    batch.parents = np.array([-1, 1], np.int32).tobytes()
    yield pytest.param(batch, id="parents")


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("bad", list(broken()))
async def test_unreadable_proposals_of_a_draft_do_not_affect_other_drafts(bad, targets, caplog):
    links = [TargetLink(f"unix:/target{i}") for i in range(targets)]
    drafts = [DraftLink(f"unix:/draft{i}", common_pb2.ModelInfo()) for i in range(2)]
    orchestrator = Orchestrator(links, drafts, metrics := Metrics())
    for target in links:
        target.up = True
    session = orchestrator.sessions.open(request_for([1, 2, 3], 9))
    good = proposals_of(session.id)

    def unreadable(draft):
        return metrics.registry.get_sample_value("outrider_unreadable_proposals_total", {"address": draft.address})

    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            await drafts[0].stream.on_frame(draft_pb2.ProposeResponse(proposals=bad))
            await drafts[1].stream.on_frame(draft_pb2.ProposeResponse(proposals=good))
    message, _ = codec.verify_request_from_pb(session.target.take_frame())
    assert [p.session_id for p in message.proposals] == [session.id] * 2
    assert [unreadable(draft) for draft in drafts] == [2, 0]
    assert len(caplog.messages) == 1
    assert "draft at unix:/draft0 sends proposals that cannot be read" in caplog.messages[0]
    orchestrator.sessions.close(session)
