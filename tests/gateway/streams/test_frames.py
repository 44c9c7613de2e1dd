"""Batches, joined and split by session."""

import itertools

import numpy as np
import pytest

from gateway.streams.frames import _COLUMNS, join, split_proposals
from outrider.speculation.proposal import Proposal
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

OWNERS = {1: "a", 2: "b", 3: "a", 4: None, 5: "b"}


def proposal(session, nodes):
    tokens = np.arange(nodes, dtype=np.uint32) + 10 * session
    parents = np.arange(-1, nodes - 1, dtype=np.int32)
    scores = -np.arange(nodes, dtype=np.float32) - session
    return Proposal(session, 100 + session, 2**63 + session, tokens, parents, scores, committed_length=90 + session)


def content(batch):
    return [
        (one.session_id, one.anchor_length, one.anchor_hash, one.tokens.tolist(), one.parents.tolist(),
         one.log_scores.tolist(), one.committed_length)
        for one in codec.proposals_from_pb(batch)
    ]  # fmt: skip


@pytest.mark.parametrize("sessions", [(1, 2, 3, 4, 5), (1, 3), (4,), (2, 4), (5, 2, 1), ()])
def test_proposals_are_split_by_owner_and_keep_their_order(sessions):
    proposals = [proposal(session, session % 3 + index % 2) for index, session in enumerate(sessions)]
    batch = codec.proposals_to_pb(proposals)
    found = split_proposals(batch, OWNERS.get)
    expected = {
        key: content(codec.proposals_to_pb([one for one in proposals if OWNERS[one.session_id] == key]))
        for key in {OWNERS[session] for session in sessions} - {None}
    }
    assert {key: content(part) for key, part in found.items()} == expected
    if found:
        assert sorted(content(join(list(found.values())))) == sorted(itertools.chain(*expected.values()))


def test_all_fields_are_split():
    assert list(_COLUMNS) == [field.name for field in common_pb2.ProposalBatch.DESCRIPTOR.fields]
