"""The relay of hidden states: in order, to the right draft, without stray blocks."""

from types import SimpleNamespace

import numpy as np
import pytest

from gateway.orchestration import feature_relay
from gateway.telemetry.metrics import Metrics
from outrider.serving.features import FeatureBlock
from outrider.serving.messages import StepOutput
from outrider.transport import outbox
from outrider.wire.features import features_from_pb, features_to_pb


class Draft:
    """Notes what it is fed."""

    up, address = True, "here"

    def __init__(self, spec=1):
        self.feature_spec = spec
        self.fed = []

    def feed(self, batch):
        self.fed += [(block.session_id, block.first, len(block.rows)) for block in features_from_pb(batch)]
        return True


def session(draft, end=0):
    """One that was opened twice on its target."""
    return SimpleNamespace(draft=draft, features_end=end, reopening=SimpleNamespace(active=True))


def relay(sessions, drafts, *blocks, spec=1):
    rows = [FeatureBlock(name, first, np.zeros((count, 4), np.uint8), spec) for name, first, count in blocks]
    placement = SimpleNamespace(drafts=drafts)
    feature_relay.relay(features_to_pb(rows), sessions, placement, Metrics().services)


def test_states_in_transit_are_dropped_after_all_were_requested_again():
    draft = Draft()
    sessions = {1: session(draft, 57), 2: session(draft, 10)}
    relay(sessions, [draft], (1, 57, 3), (2, 10, 2))
    sessions[1].features_end = 0  # another draft took the session over
    relay(sessions, [draft], (1, 60, 2), (2, 12, 1))
    relay(sessions, [draft], (1, 0, 16))
    relay(sessions, [draft], (1, 16, 48), (2, 13, 1))
    assert draft.fed == [(1, 57, 3), (2, 10, 2), (2, 12, 1), (1, 0, 16), (1, 16, 48), (2, 13, 1)]
    assert (sessions[1].features_end, sessions[2].features_end) == (64, 14)


def test_only_stray_blocks_of_a_frame_are_dropped():
    draft = Draft()
    sessions = {1: session(draft), 2: session(draft, 10)}
    relay(sessions, [draft], (1, 57, 3), (1, 0, 16), (2, 10, 2), (1, 16, 44), (1, 57, 4))
    assert draft.fed == [(1, 0, 16), (2, 10, 2), (1, 16, 44), (1, 57, 4)]
    assert (sessions[1].features_end, sessions[2].features_end) == (61, 12)


@pytest.mark.parametrize("others", [[], [Draft(1)]])
def test_a_draft_does_not_receive_states_of_another_specification(others):
    """It has taken the session over, and the prompt's first rows for the other one were on their way."""
    draft = Draft(2)
    sessions = {1: session(draft)}
    sessions[1].reopening.active = False
    relay(sessions, [draft, *others], (1, 0, 16), (1, 16, 16), spec=1)
    assert (draft.fed, sessions[1].features_end) == ([], 0)
    relay(sessions, [draft, *others], (1, 0, 16), spec=2)
    relay(sessions, [draft, *others], (1, 16, 4), spec=1)
    relay(sessions, [draft, *others], (1, 16, 8), spec=2)
    assert (draft.fed, sessions[1].features_end) == ([(1, 0, 16), (1, 16, 8)], 24)


def test_gaps_are_relayed_to_the_draft():
    draft = Draft()
    sessions = {1: session(draft), 2: session(draft, 10)}
    sessions[1].reopening.active = False  # nothing can be on its way from before
    relay(sessions, [draft], (1, 8, 3), (2, 12, 1))
    assert draft.fed == [(1, 8, 3), (2, 12, 1)]


def test_a_dropped_beginning_is_relayed_as_a_gap(monkeypatch):
    """Were it taken for what was on its way from before, nothing of the session would ever be fed."""
    monkeypatch.setattr(outbox, "BACKLOG_BYTES", 40)
    box = outbox.Outbox()
    for name, first, count in ((2, 9, 8), (1, 0, 16), (1, 16, 2)):
        box.add(StepOutput(features=[FeatureBlock(name, first, np.zeros((count, 4), np.uint8))]))
    draft = Draft()
    sessions = {1: session(draft)}
    relay(sessions, [draft], *((b.session_id, b.first, len(b.rows)) for b in box.take().features))
    box.add(StepOutput(features=[FeatureBlock(1, 18, np.zeros((1, 4), np.uint8))]))
    relay(sessions, [draft], *((b.session_id, b.first, len(b.rows)) for b in box.take().features))
    assert [block for block in draft.fed if block[0] == 1] == [(1, 0, 1), (1, 18, 1)]


def test_each_draft_receives_the_states_of_its_sessions():
    one, other = Draft(), Draft()
    sessions = {1: session(one), 2: session(other), 3: session(None)}
    relay(sessions, [one, other], (1, 0, 2), (2, 0, 3), (3, 0, 4), (9, 0, 1))
    assert (one.fed, other.fed) == ([(1, 0, 2)], [(2, 0, 3)])


def test_of_a_pool_only_the_sessions_own_drafts_are_looked_at():
    """Also where a session has moved to another target, with states of the old one on their way."""
    own, other = Draft(), Draft()
    moved = session(own, 16)
    relay({1: moved}, None, (1, 16, 2))
    assert (own.fed, moved.features_end) == ([(1, 16, 2)], 18)
    relay({}, [own, other], (1, 18, 1))
    assert own.fed == [(1, 16, 2)]


def test_an_only_draft_receives_the_ends_of_closed_sessions():
    draft = Draft()
    relay({}, [draft, Draft(0)], (1, 18, 1))
    assert draft.fed == [(1, 18, 1)]
