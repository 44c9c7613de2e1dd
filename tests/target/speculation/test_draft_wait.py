"""When steps wait for drafts, and for how long, on a simulated clock."""

import pytest

from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import MEASURING_MODES, ModePolicy
from services.target.speculation.modes.trial import TRIAL
from tests.support.target.virtual_time.drafter_clock import Clock, work


@pytest.mark.parametrize(
    ("answer", "gain", "pays"),
    [
        (0.001, 1, True),
        (0.005, 0, False),
        (0.025, 3, True),
        (0.040, 3, True),
        (0.040, 1, False),
        (0.055, 3, True),
        (0.065, 3, False),
    ],
)
def test_steps_wait_for_drafts_where_that_pays(answer, gain, pays):
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4 * TRIAL, answer=answer, gain=gain)
    waits = work(clock, policy, 32 * TRIAL, answer=answer, gain=gain)
    share = sum(wait > 0 for wait in waits) / len(waits)
    assert share > 0.8 if pays else share < 0.2
    assert max(waits) <= 0.06 + 1e-9


def test_the_policy_waits_once_drafts_become_good():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.004, gain=0)
    waits = work(clock, policy, 160 * TRIAL, answer=0.001, gain=2)[-16 * TRIAL :]
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


def test_no_wait_without_a_drafter_or_sessions():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    for _ in range(3 * TRIAL):
        clock.now += 0.03
        policy.begin()
        policy.end([1, 2], 2, 2)
        assert policy.wait.remaining == 0.0
    for _ in range(2):  # the first one may be part of an unmeasured start
        policy.received(1, fresh=True)
        clock.now += 0.03
        policy.end([1, 2], 2, 2)
    assert policy.wait.remaining > 0.0
    policy.wait.closed(1)
    assert policy.wait.remaining == 0.0


def first_commit(clock, policy, session_id, others=(), prompt=100, each=0.01):
    """A session's prompt is read, and its first token committed. Returns how long the next step may be held."""
    for one in (1, 2):
        if not policy.wait.has_drafter:
            policy.received(one, fresh=True)
            policy.wait.closed(one)
    policy.begin(1 + len(others))
    clock.now += prompt * each
    policy.end([session_id, *others], 1 + len(others), 1 + len(others), prompts=prompt, unread={session_id: prompt})
    return policy.wait.remaining


def test_a_step_is_held_for_a_first_answer_as_long_as_the_target_read_the_prompt():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT,), clock)
    assert first_commit(clock, policy, 5) == pytest.approx(1.0)
    policy.received(5, fresh=True)
    assert policy.wait.remaining == 0.0
    assert first_commit(clock, policy, 6, prompt=1000) == pytest.approx(2.0), "at most"
    policy.received(6, fresh=True)
    assert first_commit(clock, policy, 7, others=(5, 6)) <= 0.3, "sessions with answers do not wait for a new one"


def test_no_step_is_held_for_first_answers_that_do_not_come():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT,), clock)
    held = []
    for session_id in range(5, 10):
        held.append(first_commit(clock, policy, session_id))
        clock.now += held[-1]
        policy.begin(1)
        clock.now += 0.01
        policy.end([session_id], 1, 1, unread={session_id: 101})
        assert policy.wait.remaining == 0.0, "once a session"
        policy.wait.closed(session_id)
    assert [seconds > 0.9 for seconds in held] == [True, True, False, False, False]
    policy.received(10, fresh=True)
    assert first_commit(clock, policy, 11) > 0.0


def test_nothing_is_held_for_first_answers_without_a_drafter():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT,), clock)
    policy.begin(1)
    clock.now += 1.0
    policy.end([1], 1, 1, prompts=100, unread={1: 100})
    assert policy.wait.remaining == 0.0


@pytest.mark.parametrize("longest", [None, 2.0])
def test_waiting_ends_for_a_session_that_its_drafter_left(longest):
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest)
    waits = []
    for step in range(20):
        policy.begin(2)
        clock.now += 0.030
        policy.end([1, 2], 2, 2)
        policy.received(1, fresh=True)
        if not 4 <= step < 16:
            policy.received(2, fresh=True)
        waits.append(policy.wait.remaining)
        clock.now += waits[-1]
    assert [wait > 0 for wait in waits] == [False] * 4 + [True] * 3 + [False] * 13
    policy.begin(2)
    policy.end([1, 2], 2, 2)
    policy.received(1, fresh=True)
    assert policy.wait.remaining > 0, "its drafter answers again"


def test_a_measured_drafter_is_waited_for_at_any_cost():
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    waits = work(clock, policy, 8 * TRIAL, answer=0.9, gain=0)
    assert set(waits[2:]) == {0.9}
    assert max(work(clock, policy, 8, answer=5.0, gain=0)) == 2.0
    policy.begin()
    policy.end([1, 2], 2, 2)
    policy.received(1, fresh=True)
    assert policy.wait.remaining == 2.0  # for the first answer of the other session


def test_the_first_answer_is_waited_for_in_measurements():
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    policy.begin()
    policy.end([1], 1, 1, prompts=100)
    assert policy.wait.remaining == 2.0


def test_only_one_step_is_held_where_no_drafter_answers():
    """A target that must wait for its drafter gets requests before there is one."""
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    policy.begin()
    policy.end([1], 1, 1)
    clock.now += 1.0
    assert policy.wait.remaining == 1.0
    policy.begin()  # a step with another session's prompt
    policy.end([1], 1, 1)
    assert policy.wait.remaining == 2.0
    clock.now += 2.0
    for _ in range(3):
        policy.begin()
        policy.end([1], 1, 1)
        assert policy.wait.remaining == 0.0
    policy.received(1, fresh=True)
    policy.begin()
    policy.end([1], 1, 1)
    assert policy.wait.remaining == 2.0, "a drafter has answered"


def test_what_drafters_take_to_read_prompts_counts_against_the_modes_with_drafts():
    """A draft that reads long prompts while the target waits must save more than that in short answers."""
    shares = []
    for reading in (0.02, 2.0):
        clock = Clock()
        policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.NONE), clock)
        policy.received(0, fresh=True)
        waited = steps = 0
        for session_id in range(1, 120):
            policy.begin(1)
            clock.now += 2.0  # a prompt of 200 tokens
            drafted = policy.mode is SpeculationMode.WAIT_FOR_DRAFT
            policy.end(
                [session_id] if drafted else [], 1, 1, prompts=200, unread={session_id: 200} if drafted else None
            )
            for number in range(12):
                drafted = policy.mode is SpeculationMode.WAIT_FOR_DRAFT
                clock.now += min(policy.wait.remaining, 0.005 if number else reading)
                if drafted:
                    policy.received(session_id, fresh=True)
                policy.begin(1)
                clock.now += 0.030
                policy.end([session_id] if drafted else [], 1, 2 if drafted else 1)
                waited, steps = waited + drafted, steps + 1
            policy.wait.closed(session_id)
        shares.append(waited / steps)
    assert shares[0] > 0.8
    assert shares[1] < 0.2
