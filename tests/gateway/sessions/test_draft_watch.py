"""The path that a session's draft scored highest."""

import numpy as np

from gateway.sessions.draft_watch import DraftWatch, DraftWatches
from outrider.speculation.proposal import Proposal, path_hash
from outrider.wire import codec

PROMPT = [5, 6, 7]


def proposal(above, tokens, parents, scores, session=1):
    path = np.array(PROMPT + above, np.uint32)
    return Proposal(
        session, len(path), path_hash(path), np.array(tokens, np.uint32), np.array(parents, np.int32),
        np.array(scores, np.float32),
    )  # fmt: skip


def watch_of_a_tree():
    #   root ── 10 ── 11 ── 12
    #       └── 20 ── 21   └── 13 (likelier)
    watch = DraftWatch(PROMPT)
    watch.merge(proposal([], [10, 11, 20, 21], [-1, 0, -1, 2], [-0.1, -0.2, -2.0, -0.1]))
    watch.merge(proposal([10, 11], [12, 13], [-1, -1], [-2.0, -0.5]))
    return watch


def test_the_best_path_follows_the_accepted_tokens():
    assert watch_of_a_tree().commit([99], drafted=True) == (10, 11, 13)
    assert watch_of_a_tree().commit([10, 99], drafted=True) == (10, 11, 13)
    assert watch_of_a_tree().commit([20, 99], drafted=True) == (20, 21)
    assert watch_of_a_tree().commit([10, 11, 12, 99], drafted=True) == (10, 11, 12)


def test_a_plain_step_has_no_path_and_keeps_the_tree():
    watch = watch_of_a_tree()
    assert watch.commit([10], drafted=False) == ()
    assert watch.commit([99], drafted=True) == (11, 13)
    assert watch.commit([98], drafted=True) == ()


def test_only_watched_sessions_merge_proposals():
    batch = codec.proposals_to_pb([proposal([], [10], [-1], [-0.1]), proposal([], [30], [-1], [-0.1], session=2)])
    watches = DraftWatches()
    watches.merge(batch)
    watches[1] = DraftWatch(PROMPT)
    watches.merge(batch)
    assert watches[1].commit([99], drafted=True) == (10,)
