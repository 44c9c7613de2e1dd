"""The mode policy by the distance of the draft, in virtual time, beside policies that have one mode."""

import pytest

from services.target.speculation.draft_wait import longest_wait
from services.target.speculation.estimates.in_time import share_in_time
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import SERVICE_MODES, ModePolicy
from tests.support.target.virtual_time.drafter_clock import Clock
from tests.support.target.virtual_time.link_replay import Link, Replay

LENGTH, SERIES, ANSWERS = 128, 3, 4
SINGLE = [SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE]


def seconds(link, modes, longest=None):
    """Of each of a target's first answers, over three series of texts."""
    totals = [0.0] * ANSWERS
    for series in range(SERIES):
        clock = Clock()
        replay = Replay(ModePolicy(modes, clock, longest), clock, link, series)
        for number in range(ANSWERS):
            totals[number] += LENGTH / replay.answer(LENGTH)
    return totals


@pytest.mark.parametrize(
    ("step", "latency", "best"),
    [
        (0.020, 0.006, SpeculationMode.WAIT_FOR_DRAFT),
        (0.020, 0.016, SpeculationMode.DRAFT_IF_READY),
        (0.040, 0.006, SpeculationMode.WAIT_FOR_DRAFT),
        (0.040, 0.046, SpeculationMode.DRAFT_IF_READY),
        (0.020, 0.046, SpeculationMode.DRAFT_IF_READY),
    ],
)
def test_the_policy_is_near_the_best_mode_at_any_distance(step, latency, best):
    link = Link(step, latency)
    single = {mode: seconds(link, [mode], longest=10.0) for mode in SINGLE}
    policy = seconds(link, SERVICE_MODES)
    assert min(single, key=lambda mode: sum(single[mode])) is best
    assert policy[0] < min(each[0] for each in single.values()) / 0.9
    assert sum(policy[1:]) < min(sum(each[1:]) for each in single.values()) / 0.95


def test_no_step_is_held_for_a_draft_that_cannot_answer_in_time():
    link, clock = Link(step=0.020, latency=0.060), Clock()
    replay = Replay(ModePolicy([SpeculationMode.WAIT_FOR_DRAFT], clock), clock, link)
    replay.answer(LENGTH)
    assert longest_wait(link.step) < link.latency
    assert sum(held > 0.001 for held in replay.held) <= 2, "until the first answer has been measured"
    replay.answer(LENGTH)
    assert max(replay.held[-20:]) < 0.001


@pytest.mark.parametrize(
    ("accepted", "latency", "share"),
    [
        (1.6, 0.010, 0.50),  # 0.615 / (1 + 0.615 - 0.381)
        (1.6, 0.025, 0.33),  # two steps: 0.379 / (1 + 0.379 - 0.234)
        (1.6, 0.045, 0.21),
        (4.0, 0.010, 0.59),
        (0.0, 0.010, 0.0),
    ],
)
def test_the_share_of_steps_that_an_answer_reaches(accepted, latency, share):
    assert share_in_time(accepted, 0.020, latency) == pytest.approx(share, abs=0.01)
