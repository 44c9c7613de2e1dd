"""The mode policy on a simulated clock: which mode each load has, and what is measured."""

import pytest

from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from services.target.speculation.modes.trial import TRIAL
from tests.support.target.virtual_time.drafter_clock import Clock, work


@pytest.mark.parametrize(("step", "tokens", "pays"), [(0.05, 2, False), (0.05, 8, True), (0.03, 2, False)])
def test_long_steps_of_a_mode_count_in_full(step, tokens, pays):
    """Only outliers within a mode are cut, not steps that are longer than those of another mode."""
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    policy.received(1, fresh=True)
    modes = []
    for _ in range(64 * TRIAL):
        modes.append(policy.mode)
        drafts = policy.mode is SpeculationMode.DRAFT_IF_READY
        policy.begin(1)
        clock.now += step if drafts else 0.01
        policy.end([1] if drafts else [], 1, tokens if drafts else 1)
    late = modes[32 * TRIAL :]
    assert late.count(SpeculationMode.DRAFT_IF_READY if pays else SpeculationMode.NONE) > 0.8 * len(late)


def test_an_outlier_counts_as_a_usual_step():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    policy.received(1, fresh=True)
    for number in range(64 * TRIAL):
        drafts = policy.mode is SpeculationMode.DRAFT_IF_READY
        policy.begin(1)
        clock.now += (0.02 if drafts else 0.03) + 5.0 * (number % 100 == 50)
        policy.end([1] if drafts else [], 1, 1)
    rates = {mode: policy.selector.throughput(mode) for mode in (SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE)}
    assert rates == pytest.approx({SpeculationMode.DRAFT_IF_READY: 50.0, SpeculationMode.NONE: 1 / 0.03}, rel=0.2)


def test_time_for_which_the_host_waits_beside_a_step_in_flight_belongs_to_the_step():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY,), clock)
    began = clock.now
    for _ in range(40):
        clock.now += 0.003  # until the host launches the next step
        policy.begin(1, since=began)
        clock.now += 0.001
        policy.end([1], 1, 2)
        began = clock.now
    assert policy.pace.seconds == pytest.approx(0.004)
    clock.now += 10.0  # idle
    began = clock.now
    clock.now += 0.004
    policy.begin(1, since=began)
    policy.end([1], 1, 2)
    assert policy.pace.seconds == pytest.approx(0.004)


def share_of(mode, clock, policy, steps, **kwargs):
    count = 0
    for _ in range(steps):
        count += policy.mode is mode
        work(clock, policy, 1, **kwargs)
    return count / steps


def test_drafting_is_paused_where_it_costs_more_than_it_gains():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    expensive = {"answer": 0.001, "gain": 0.2, "drafting": 0.020}
    work(clock, policy, 16 * TRIAL, **expensive)
    assert share_of(SpeculationMode.NONE, clock, policy, 256 * TRIAL, **expensive) > 0.95
    cheap = {**expensive, "drafting": 0.0}
    work(clock, policy, 256 * TRIAL, **cheap)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, **cheap) > 0.85


def test_each_load_has_a_mode_of_its_own():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    for _ in range(20):
        few = share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 8 * TRIAL, answer=0.001, gain=1.0)
        many = share_of(
            SpeculationMode.NONE, clock, policy, 8 * TRIAL, answer=0.001, gain=0.2, drafting=0.040, sessions=8
        )
    assert min(few, many) > 0.8


def test_modes_that_lose_with_few_sessions_are_tried_late_with_many():
    """Drafts far behind at one session are tried only after a pause at eight sessions and at four."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    expensive = {"answer": 0.001, "gain": 0.2, "drafting": 0.060}
    work(clock, policy, 16 * TRIAL, **expensive)
    for sessions in (8, 4):
        assert share_of(SpeculationMode.NONE, clock, policy, 8 * TRIAL, **expensive, sessions=sessions) > 0.98
    assert 0.98 < share_of(SpeculationMode.NONE, clock, policy, 999 * TRIAL, **expensive, sessions=8) < 1.0


@pytest.mark.parametrize(("gain", "immediately"), [(3.0, True), (1.0, False), (0.2, False)])
def test_many_sessions_try_drafts_at_once_where_few_gained_much(gain, immediately):
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 16 * TRIAL, answer=0.001, gain=gain)
    begun = clock.now
    waits = work(clock, policy, 8 * TRIAL, answer=0.001, gain=gain, sessions=8)
    assert (sum(wait > 0 for wait in waits) > 0.5 * len(waits)) == immediately
    while clock.now < begun + 35:
        work(clock, policy, 1, answer=0.001, gain=gain, sessions=8)
    waits = work(clock, policy, 64 * TRIAL, answer=0.001, gain=gain, sessions=8)
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


@pytest.mark.parametrize("expensive", [True, False])
def test_expensive_drafts_are_tried_once_a_load_has_lasted(expensive):
    clock = Clock()
    policy = ModePolicy(clock=clock, expensive=lambda: expensive)
    begun = clock.now
    work(clock, policy, 1, answer=0.001, gain=2.0)
    assert (share_of(SpeculationMode.NONE, clock, policy, 16 * TRIAL, answer=0.001, gain=2.0) > 0.98) == expensive
    while clock.now < begun + 35:
        work(clock, policy, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, answer=0.001, gain=2.0) > 0.8


def after_the_first_trial(first, then, drafting=0.0):
    """Share of steps with drafts in the ten seconds after the first one, with eight sessions; and the seconds lost.

    first, then: tokens gained by drafts in the first 18 steps, before scores are calibrated, and later.
    drafting: seconds by which drafts slow a step; the first step ten times as much
    """
    clock = Clock()
    policy = ModePolicy(clock=clock)
    steps = drafted = 0
    lost, begun = 0.0, None
    while begun is None or clock.now < begun + 10:
        drafts = policy.mode is not SpeculationMode.NONE
        before, gain = clock.now, first if drafted <= 18 else then
        slowdown = drafting * (10 if drafted == 1 else 1)  # one step before was the first of the load
        work(clock, policy, 1, answer=0.0, gain=gain, drafting=slowdown, sessions=8, step=0.010)
        drafted += drafts
        if drafted > 1:
            begun = begun or clock.now
            steps += 1
            lost += drafts * (clock.now - before - 0.010 * (1 + gain))
    return (drafted - 1) / steps, lost


def test_drafts_that_tie_in_the_first_trial_are_tried_again():
    """Drafts are tried half a minute after a load began; uncalibrated scores let too many draft tokens be verified."""
    share, _ = after_the_first_trial(first=0.2, then=0.45, drafting=0.002)
    assert share > 0.9


@pytest.mark.parametrize("gain", [0.0, 0.19])
def test_drafts_that_never_pay_cost_little(gain):
    share, lost = after_the_first_trial(first=gain, then=gain, drafting=0.002)
    assert share < 0.2
    assert lost < 0.01 * 10.0


def test_many_sessions_begin_without_drafts():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 1, answer=0.001, gain=1.0, sessions=8)
    assert share_of(SpeculationMode.NONE, clock, policy, 40 * TRIAL, answer=0.001, gain=1.0, sessions=8) == 1.0
    work(clock, policy, 40 * TRIAL, answer=0.001, gain=1.0, sessions=8)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, answer=0.001, gain=1.0, sessions=8) > 0.6


def test_a_growing_load_is_recognized_during_prefill():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4, answer=0.001, gain=0.2)
    modes = []
    for sessions in (1, 2, 4, 8, 7, 8):
        policy.begin()
        clock.now += 0.1
        policy.end([1], sessions, sessions, prompts=50)
        modes.append(policy.mode)
    assert modes == [
        SpeculationMode.WAIT_FOR_DRAFT,
        SpeculationMode.WAIT_FOR_DRAFT,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
    ]


def test_sessions_in_prefill_count_as_load():
    """Eight sessions follow one: steps do not wait for the drafts of the one while the others are in prefill."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.001, gain=0.5)
    assert policy.mode is SpeculationMode.WAIT_FOR_DRAFT
    modes = []
    for prefill in (1, 0):
        for _ in range(4):
            policy.begin(8)
            modes.append(policy.mode)
            clock.now += 0.1
            policy.end([1], 1, 1, prompts=50 * prefill)  # sessions that wait for pages compute no prompt tokens
            modes.append(policy.mode)
    assert set(modes) == {SpeculationMode.NONE}
    for _ in range(2):
        policy.begin(1)
        policy.end([1], 1, 1)
    assert policy.mode is SpeculationMode.WAIT_FOR_DRAFT


def test_a_mode_whose_first_trial_failed_is_retried_soon():
    """The draft service compiles programs, or other processes start, during the first trial."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 3 * TRIAL, answer=0.001, gain=2.0, drafting=1.0)
    assert policy.mode is SpeculationMode.NONE
    begun = clock.now
    while clock.now < begun + 10:
        work(clock, policy, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 8 * TRIAL, answer=0.001, gain=2.0) > 0.8


def test_the_first_steps_of_a_load_are_not_measured():
    """The first steps of the draft service are slow and compete with the target for the cores."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 2, answer=0.001, gain=2.0, drafting=1.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 4 * TRIAL, answer=0.001, gain=2.0) > 0.7


def test_steps_with_prompts_are_not_measured():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.001, gain=1.0)
    shares = []
    for _ in range(16):
        clock.now += 3.0
        policy.end([1], 1, 1, prompts=100)
        shares.append(share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, TRIAL, answer=0.001, gain=1.0))
    assert sum(shares) > 0.8 * len(shares)


@pytest.mark.parametrize(("prompt_tokens", "plain"), [(0, False), (2000, True)])
def test_prompts_slowed_by_the_drafter_count(prompt_tokens, plain):
    """Drafts gain a tenth without prompts; a drafter makes prompts take half as long again."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    modes = []
    for _ in range(200):
        if prompt_tokens:
            policy.begin()
            clock.now += prompt_tokens * (0.0002 if policy.mode is SpeculationMode.NONE else 0.0003)
            policy.end([1], 0, 0, prompts=prompt_tokens)
        modes.append(share_of(SpeculationMode.NONE, clock, policy, TRIAL, answer=0.001, gain=0.15))
    share = sum(modes[50:]) / len(modes[50:])
    assert share > 0.9 if plain else share < 0.1


def test_decoding_beside_prompts_is_subtracted_from_prefill_cost():
    """Drafts commit two tokens in twice a plain step's time, but beside prompts there are none."""
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    policy.received(1, fresh=True)
    for _ in range(100):
        for prompts in (0, 0, 0, 500):
            drafts = policy.mode is SpeculationMode.DRAFT_IF_READY and not prompts
            policy.begin()
            clock.now += 0.030 * (1 + drafts) + 0.0002 * prompts
            policy.end([1], 1, 1 + drafts, prompts=prompts)
    seconds = policy.prefill_cost.seconds(SpeculationMode.DRAFT_IF_READY)
    assert seconds == pytest.approx(0.0002 * policy.prefill_cost.prompt_tokens_per_token)


@pytest.mark.parametrize("expensive", [{"answer": 0.025, "drafting": 0.010}, {"answer": 0.030, "drafting": 0.060}])
def test_trials_of_losing_modes_take_one_percent_of_the_time_at_most(expensive):
    clock, steps = Clock(), 1024 * TRIAL
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, gain=0.2, **expensive)
    before = clock.now
    plain = share_of(SpeculationMode.NONE, clock, policy, steps, gain=0.2, **expensive)
    taken = clock.now - before
    assert taken < 1.01 * 0.030 * steps
    assert plain < 1.0  # losing modes are tried all the same


def test_catching_up_of_a_drafter_counts_as_the_cost_of_a_trial():
    """After a pause the steps of a trial are long until the drafter has caught up; then drafts nearly pay."""
    clock, steps = Clock(), 1024 * TRIAL
    policy = ModePolicy(clock=clock)
    lost, behind = 0.0, 40
    for _ in range(steps):
        if policy.mode is SpeculationMode.NONE:
            behind = 40
        reading = 0.020 if behind > 0 and policy.mode is not SpeculationMode.NONE else 0.0
        behind -= reading > 0
        work(clock, policy, 1, answer=0.001, gain=0.9, drafting=0.030 + reading)
        lost += reading
    assert 0 < lost < 0.01 * (clock.now - 100)


def test_modes_that_are_not_open_are_not_chosen():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY), clock)
    assert share_of(SpeculationMode.NONE, clock, policy, 64 * TRIAL, answer=0.001, gain=0.0, drafting=0.020) == 0.0


def test_a_drafter_that_is_always_late_does_not_keep_a_mode():
    """Sessions end before the drafter has read their prompts; the policy stops asking for drafts."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4 * TRIAL, answer=0.040, gain=0)
    modes = []
    for session in range(64 * TRIAL):
        policy.begin()
        clock.now += 0.030 + 0.005 * (policy.mode is not SpeculationMode.NONE)  # the drafter's prefill slows the step
        policy.end([session + 2], 1, 1)
        modes.append(policy.mode)
    assert modes.count(SpeculationMode.NONE) > 0.4 * len(modes)
    assert modes[-1] is SpeculationMode.NONE or SpeculationMode.NONE in modes[-8 * TRIAL :]


def test_multi_step_decoding_counts_each_step():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    assert policy.without_drafts, "there is no drafter"
    work(clock, policy, 4 * TRIAL, answer=1.0, gain=0, drafting=0.03)
    assert policy.mode is SpeculationMode.NONE
    assert policy.without_drafts
    selector = policy.selector
    trials, steps = selector.trials, 0
    while selector.trials == trials:  # the rest of a trial that has begun
        policy.begin()
        clock.now += 0.03
        policy.end([], 1, 1)
    trials += 1
    while selector.trials == trials:
        policy.begin()
        clock.now += 4 * 0.03
        policy.end([], 1, 4, steps=4)
        steps += 4
    assert steps == selector.steps == TRIAL
    assert policy.pace.seconds == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("tokens", "best"), [(1.5, SpeculationMode.SELF_SPECULATE), (6.0, SpeculationMode.WAIT_FOR_DRAFT)]
)
def test_a_drafter_is_compared_with_self_speculation(tokens, best):
    clock = Clock()
    policy = ModePolicy((SpeculationMode.SELF_SPECULATE, *DRAFT_MODES), clock)
    modes = []
    for step in range(128 * TRIAL):
        drafted = policy.mode in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        if step == TRIAL or (step > TRIAL and drafted):
            policy.received(1, fresh=True)
        policy.begin(1)
        itself = policy.mode is SpeculationMode.SELF_SPECULATE
        clock.now += 0.02 if itself else 0.012
        policy.end(
            [1] if drafted else [], 1, 3 if itself else tokens if policy.mode is SpeculationMode.WAIT_FOR_DRAFT else 1
        )
        modes.append(policy.mode)
        assert policy.drafting_paused == (
            step >= TRIAL and policy.mode not in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        )
    assert set(modes[:TRIAL]) == {SpeculationMode.SELF_SPECULATE}
    assert modes[32 * TRIAL :].count(best) > 0.9 * len(modes[32 * TRIAL :])


def test_a_pause_while_a_step_is_held_still_counts_its_computation():
    """Of a step that counts as a usual one, the wait is as much smaller as the step."""
    clock = Clock()
    policy, length = ModePolicy(clock=clock), 10
    for pause in [0.0, 0.0, 0.1, 0.1]:
        clock.now += 0.001
        policy.received(1, fresh=True, length=length)
        clock.now += pause
        policy.begin(1)
        clock.now += 0.010
        length += 2
        policy.end([1], 1, 2, drafted=1, accepted=1)
        policy.asked({1: length})
    assert policy.mode is SpeculationMode.WAIT_FOR_DRAFT
