"""The backlog of hidden states for a draft: small batches share a frame, in order, up to the frame's limit."""

import numpy as np

from gateway.streams.features import Backlog
from outrider.serving.features import BACKLOG_BYTES, FRAME_BYTES, FeatureBlock
from outrider.wire.features import features_from_pb, features_to_pb


def batch(session_id, first, count, width=8):
    rows = np.full((count, width), session_id, np.uint8)
    return features_to_pb([FeatureBlock(session_id, first, rows)])


def taken(backlog):
    return [(b.session_id, b.first, b.rows.shape) for b in features_from_pb(backlog.take())]


def test_small_batches_share_a_frame_in_order():
    backlog = Backlog()
    for first, session_id in ((0, 1), (0, 2), (3, 1), (4, 2)):
        assert backlog.add(batch(session_id, first, 3 + session_id - 1))
    assert len(backlog) == 4
    assert taken(backlog) == [(1, 0, (3, 8)), (2, 0, (4, 8)), (1, 3, (3, 8)), (2, 4, (4, 8))]
    assert len(backlog) == 0
    assert backlog.take() is None


def test_frames_and_backlog_are_bounded():
    backlog = Backlog()
    large = batch(1, 0, FRAME_BYTES // 8 * 5 // 8)
    count = BACKLOG_BYTES // len(large.rows)
    assert all(backlog.add(large) for _ in range(count))
    assert not backlog.add(large)
    for _ in range(2):
        assert len(taken(backlog)) == 1
    assert backlog.add(batch(2, 0, 1))
    assert len(backlog) == count - 1
