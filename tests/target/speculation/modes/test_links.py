"""Sessions of one target whose drafts are near and far, and drafts whose answers are mostly empty, in virtual time."""

from statistics import mean

import pytest

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from tests.support.target.virtual_time.crowd_replay import Crowd
from tests.support.target.virtual_time.drafter_clock import Clock
from tests.support.target.virtual_time.link_replay import Link

NEAR, FAR = 0.0042, 0.024  # seconds to an answer of a draft that takes 4 ms, over links of 0.2 and 20 ms
WAIT, READY = [SpeculationMode.WAIT_FOR_DRAFT], [SpeculationMode.DRAFT_IF_READY]


def crowds(modes, step, latencies, empty=0.0, seconds=20.0):
    """Targets after as many seconds, and their mean tokens/s."""
    all_of, rates = [], []
    for seed in range(3):
        clock = Clock()
        crowd = Crowd(ModePolicy(modes, clock), clock, [Link(step, latency) for latency in latencies], seed, empty)
        rates.append(crowd.run(seconds))
        all_of.append(crowd)
    return all_of, mean(rates)


@pytest.mark.parametrize(("latencies", "gain"), [([NEAR, FAR], 1.05), ([NEAR] * 3 + [FAR], 1.08)])
def test_steps_wait_for_near_drafts_and_for_far_ones_not(monkeypatch, latencies, gain):
    """Each session's own distance against the mean of all, and against waiting for none."""
    step = 0.040
    of_links, own = crowds(WAIT, step, latencies)
    held = [seconds for crowd in of_links for seconds in crowd.held[40:]]
    assert mean(seconds > 0.001 for seconds in held) > 0.5
    assert mean(seconds > 0.012 for seconds in held) < 0.1
    _, ready = crowds(READY, step, latencies)
    monkeypatch.setattr(AnswerLatency, "of", lambda latency, _: latency)
    _, of_mean = crowds(WAIT, step, latencies)
    assert own > gain * max(ready, of_mean)


def test_links_of_sessions_that_have_ended_are_forgotten():
    (crowd, *_), _ = crowds(WAIT, 0.040, [NEAR, FAR], seconds=60.0)
    assert crowd.policy.wait.latency.count > 500
    assert len(crowd.policy.wait.latency.links) <= 2


@pytest.mark.parametrize(("empty", "least", "most"), [(0.0, 0.5, 1.0), (0.95, 0.0, 0.4)])
def test_steps_do_not_wait_for_answers_that_are_mostly_empty(empty, least, most):
    of_empty, _ = crowds(WAIT, 0.033, [0.003], empty)
    held = [seconds > 0.001 for crowd in of_empty for seconds in crowd.held[40:]]
    assert least < mean(held) < most
