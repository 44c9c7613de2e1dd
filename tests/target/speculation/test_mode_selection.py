"""Patience on a clock that the test winds: it waits where that pays, and goes at once where it does not."""

import pytest

from services.target.speculation.mode_policy import MEASURING_MODES, SERVICE_MODES, ModePolicy
from services.target.speculation.mode_selector import DRAFT_MODES, TRIAL, ModeSelector, PrefillCost, SpeculationMode


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(clock, policy, steps, *, answer, gain, step=0.030, drafting=0.0, sessions=1):
    """Steps of a session whose hints take `answer` seconds and, if awaited, bring `gain` tokens. Returns waits.

    drafting: seconds that a step takes longer because the drafter uses the machine too.
    """
    waits = []
    for _ in range(steps):
        waited = min(policy.wait.remaining, answer)
        fresh = waited == answer and policy.wait.remaining > 0
        clock.now += waited
        drafted = policy.mode is not SpeculationMode.NONE
        if drafted:
            policy.received(1, fresh=fresh)
        waits.append(waited)
        policy.begin()
        clock.now += step + drafting * drafted
        policy.end([1] if drafted else [], sessions, sessions * (1 + gain if fresh and drafted else 1))
    return waits


@pytest.mark.parametrize(
    ("answer", "gain", "pays"),
    [(0.001, 1, True), (0.005, 0, False), (0.025, 3, True), (0.040, 3, True), (0.040, 1, False), (0.055, 3, False)],
)
def test_it_waits_where_that_pays(answer, gain, pays):
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4 * TRIAL, answer=answer, gain=gain)
    waits = work(clock, policy, 32 * TRIAL, answer=answer, gain=gain)
    share = sum(wait > 0 for wait in waits) / len(waits)
    assert share > 0.8 if pays else share < 0.2
    assert max(waits) <= 0.05 + 1e-9


def test_turns_are_as_quickly_told_after_years():
    selector = ModeSelector(
        (SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    assert selector.steps == 4
    selector._trials = 1 << 40
    assert selector.steps == TRIAL


@pytest.mark.parametrize("loser", [SpeculationMode.DRAFT_IF_READY, SpeculationMode.SELF_SPECULATE])
def test_what_has_lost_for_years_is_tried_all_the_same(loser):
    selector = ModeSelector((loser, SpeculationMode.NONE), loser, PrefillCost())
    tried = 0
    for _ in range(20_000):
        tried += selector.mode is loser
        seconds = 0.001 * selector.steps * (1.2 if selector.mode is loser else 1.0)
        selector.spend(selector.steps, seconds)
        selector.end_trial(selector.steps, seconds)
    assert tried > 600


@pytest.mark.parametrize(("step", "tokens", "pays"), [(0.05, 2, False), (0.05, 8, True), (0.03, 2, False)])
def test_steps_that_are_long_by_nature_count_as_long(step, tokens, pays):
    """However few tokens those of another mode take: no other process has delayed them."""
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


def test_a_step_that_was_held_up_counts_as_a_usual_one():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    policy.received(1, fresh=True)
    for number in range(64 * TRIAL):
        drafts = policy.mode is SpeculationMode.DRAFT_IF_READY
        policy.begin(1)
        clock.now += (0.02 if drafts else 0.03) + 5.0 * (number % 100 == 50)
        policy.end([1] if drafts else [], 1, 1)
    rates = {mode: measured.tokens / measured.seconds for mode, measured in policy._selectors[0]._measured.items()}
    assert rates == pytest.approx({SpeculationMode.DRAFT_IF_READY: 50.0, SpeculationMode.NONE: 1 / 0.03}, rel=0.2)


def test_it_changes_its_mind():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.004, gain=0)
    waits = work(clock, policy, 160 * TRIAL, answer=0.001, gain=2)[-16 * TRIAL :]
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


def test_without_drafter_or_sessions_nothing_is_awaited():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    for _ in range(3 * TRIAL):
        clock.now += 0.03
        policy.begin()
        policy.end([1, 2], 2, 2)
        assert policy.wait.remaining == 0.0
    for _ in range(2):  # the first one may have begun with a pause
        policy.received(1, fresh=True)
        clock.now += 0.03
        policy.end([1, 2], 2, 2)
    assert policy.wait.remaining > 0.0
    policy.wait.closed(1)
    assert policy.wait.remaining == 0.0


def share_of(way, clock, policy, steps, **kwargs):
    count = 0
    for _ in range(steps):
        count += policy.mode is way
        work(clock, policy, 1, **kwargs)
    return count / steps


def test_a_drafter_that_costs_more_than_it_brings_is_told_to_rest():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    dear = {"answer": 0.001, "gain": 0.2, "drafting": 0.020}
    work(clock, policy, 16 * TRIAL, **dear)
    assert share_of(SpeculationMode.NONE, clock, policy, 256 * TRIAL, **dear) > 0.95
    cheap = {**dear, "drafting": 0.0}
    work(clock, policy, 256 * TRIAL, **cheap)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, **cheap) > 0.85


def test_each_load_has_its_own_answer():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    for _ in range(20):
        few = share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 8 * TRIAL, answer=0.001, gain=1.0)
        many = share_of(
            SpeculationMode.NONE, clock, policy, 8 * TRIAL, answer=0.001, gain=0.2, drafting=0.040, sessions=8
        )
    assert min(few, many) > 0.8


def test_what_does_not_pay_for_few_is_no_first_choice_for_many():
    """Hints that are far behind at one session are tried at eight, and at four, after a pause; then they are tried."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    dear = {"answer": 0.001, "gain": 0.2, "drafting": 0.060}
    work(clock, policy, 16 * TRIAL, **dear)
    for sessions in (8, 4):
        assert share_of(SpeculationMode.NONE, clock, policy, 8 * TRIAL, **dear, sessions=sessions) > 0.98
    assert 0.98 < share_of(SpeculationMode.NONE, clock, policy, 999 * TRIAL, **dear, sessions=8) < 1.0


@pytest.mark.parametrize(("gain", "at_once"), [(3.0, True), (1.0, False), (0.2, False)])
def test_many_sessions_try_hints_at_once_where_few_have_gained_much(gain, at_once):
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 16 * TRIAL, answer=0.001, gain=gain)
    begun = clock.now
    waits = work(clock, policy, 8 * TRIAL, answer=0.001, gain=gain, sessions=8)
    assert (sum(wait > 0 for wait in waits) > 0.5 * len(waits)) == at_once
    while clock.now < begun + 35:
        work(clock, policy, 1, answer=0.001, gain=gain, sessions=8)
    waits = work(clock, policy, 64 * TRIAL, answer=0.001, gain=gain, sessions=8)
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


@pytest.mark.parametrize("dear", [True, False])
def test_hints_that_are_dear_are_tried_once_a_load_has_lasted(dear):
    clock = Clock()
    policy = ModePolicy(clock=clock, expensive=lambda: dear)
    begun = clock.now
    work(clock, policy, 1, answer=0.001, gain=2.0)
    assert (share_of(SpeculationMode.NONE, clock, policy, 16 * TRIAL, answer=0.001, gain=2.0) > 0.98) == dear
    while clock.now < begun + 35:
        work(clock, policy, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, answer=0.001, gain=2.0) > 0.8


def after_the_first_trial(first, then, drafting=0.0):
    """Shares of hints in ten seconds behind the first 100 steps with them, of eight sessions; and the time lost there.

    first, then: tokens that hints bring in those steps, while their scores are not calibrated, and later.
    drafting: seconds that each of these steps takes longer, and the very first one ten times of it
    """
    clock = Clock()
    policy = ModePolicy(clock=clock)
    steps = hinted = 0
    lost, begun = 0.0, None
    while begun is None or clock.now < begun + 10:
        hints = policy.mode is not SpeculationMode.NONE
        before, gain = clock.now, first if hinted <= 18 else then
        dear = drafting * (10 if hinted == 1 else 1)  # of the steps before, one was the load's first
        work(clock, policy, 1, answer=0.0, gain=gain, drafting=dear, sessions=8, step=0.010)
        hinted += hints
        if hinted > 1:
            begun = begun or clock.now
            steps += 1
            lost += hints * (clock.now - before - 0.010 * (1 + gain))
    return (hinted - 1) / steps, lost


def test_hints_whose_first_turn_ties_have_another_one():
    """Half a minute after a load began they are tried; until scores are calibrated too many nodes are verified."""
    share, _ = after_the_first_trial(first=0.2, then=0.45, drafting=0.002)
    assert share > 0.9


@pytest.mark.parametrize("gain", [0.0, 0.19])
def test_hints_that_never_pay_cost_no_more_for_it(gain):
    share, lost = after_the_first_trial(first=gain, then=gain, drafting=0.002)
    assert share < 0.15
    assert lost < 0.01 * 10.0


def test_many_sessions_that_come_first_of_all_begin_without_hints():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 1, answer=0.001, gain=1.0, sessions=8)
    assert share_of(SpeculationMode.NONE, clock, policy, 40 * TRIAL, answer=0.001, gain=1.0, sessions=8) == 1.0
    work(clock, policy, 40 * TRIAL, answer=0.001, gain=1.0, sessions=8)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 64 * TRIAL, answer=0.001, gain=1.0, sessions=8) > 0.6


def test_a_load_that_grows_is_met_while_prompts_are_read():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4, answer=0.001, gain=0.2)
    ways = []
    for sessions in (1, 2, 4, 8, 7, 8):
        policy.begin()
        clock.now += 0.1
        policy.end([1], sessions, sessions, prompts=50)
        ways.append(policy.mode)
    assert ways == [
        SpeculationMode.WAIT_FOR_DRAFT,
        SpeculationMode.WAIT_FOR_DRAFT,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
        SpeculationMode.NONE,
    ]


def test_sessions_that_have_yet_to_read_their_prompts_are_a_load():
    """Eight come behind one: hints that pay for one are not waited for while the others read."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.001, gain=0.5)
    assert policy.mode is SpeculationMode.WAIT_FOR_DRAFT
    ways = []
    for reading in (1, 0):
        for _ in range(4):
            policy.begin(8)
            ways.append(policy.mode)
            clock.now += 0.1
            policy.end([1], 1, 1, prompts=50 * reading)  # some wait for pages, and have nothing to read yet
            ways.append(policy.mode)
    assert set(ways) == {SpeculationMode.NONE}
    for _ in range(2):
        policy.begin(1)
        policy.end([1], 1, 1)
    assert policy.mode is SpeculationMode.WAIT_FOR_DRAFT


def test_of_two_ways_with_hints_one_that_is_hopeless_speaks_for_both():
    selector = ModeSelector(SERVICE_MODES, SpeculationMode.WAIT_FOR_DRAFT, PrefillCost())
    taken = []
    for _ in range(12):
        taken.append(selector.mode)
        tokens, seconds = (1.2, 2.0) if selector.mode is not SpeculationMode.NONE else (1.0, 1.0)
        selector.spend(tokens, seconds)
        selector.end_trial(tokens, seconds)
    assert taken == [SpeculationMode.WAIT_FOR_DRAFT] + 11 * [SpeculationMode.NONE]
    assert selector.loss == pytest.approx(2.0 - 1.2)


def test_a_way_whose_first_turn_went_wrong_is_tried_again_soon():
    """The draft compiles its programs, or other processes start, while hints are tried for the first time."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 3 * TRIAL, answer=0.001, gain=2.0, drafting=1.0)
    assert policy.mode is SpeculationMode.NONE
    begun = clock.now
    while clock.now < begun + 10:
        work(clock, policy, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 8 * TRIAL, answer=0.001, gain=2.0) > 0.8


def test_what_is_done_once_is_no_measure_of_a_load():
    """The draft's first rounds touch everything for the first time, and compete with the target's steps."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 2, answer=0.001, gain=2.0, drafting=1.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, 4 * TRIAL, answer=0.001, gain=2.0) > 0.7


def test_steps_with_prompts_in_them_are_no_measure():
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, answer=0.001, gain=1.0)
    shares = []
    for _ in range(16):
        clock.now += 3.0
        policy.end([1], 1, 1, prompts=100)
        shares.append(share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, policy, TRIAL, answer=0.001, gain=1.0))
    assert sum(shares) > 0.8 * len(shares)


@pytest.mark.parametrize(("rows", "plain"), [(0, False), (2000, True)])
def test_prompts_that_take_longer_because_of_the_drafter_count_too(rows, plain):
    """Hints bring a tenth while no prompts are read; these take half as long again where they are drafted for."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    ways = []
    for _ in range(200):
        if rows:
            policy.begin()
            clock.now += rows * (0.0002 if policy.mode is SpeculationMode.NONE else 0.0003)
            policy.end([1], 0, 0, prompts=rows)
        ways.append(share_of(SpeculationMode.NONE, clock, policy, TRIAL, answer=0.001, gain=0.15))
    share = sum(ways[50:]) / len(ways[50:])
    assert share > 0.9 if plain else share < 0.1


def test_tokens_beside_prompts_take_the_time_of_as_many_tokens():
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
    prompt_tokens_per_token = policy._prompts._all_tokens / policy._prompts._committed
    seconds = policy._prompts.seconds(SpeculationMode.DRAFT_IF_READY)
    assert seconds == pytest.approx(0.0002 * prompt_tokens_per_token)


@pytest.mark.parametrize("dear", [{"answer": 0.025, "drafting": 0.010}, {"answer": 0.030, "drafting": 0.060}])
def test_trials_of_ways_that_are_behind_take_a_hundredth_of_the_time_at_most(dear):
    clock, steps = Clock(), 1024 * TRIAL
    policy = ModePolicy(clock=clock)
    work(clock, policy, 64 * TRIAL, gain=0.2, **dear)
    before = clock.now
    plain = share_of(SpeculationMode.NONE, clock, policy, steps, gain=0.2, **dear)
    taken = clock.now - before
    assert taken < 1.01 * 0.030 * steps
    assert plain < 1.0  # they are tried, though


def test_what_a_drafter_has_to_read_first_counts_as_the_cost_of_a_trial():
    """After a rest the steps of a trial take long until the drafter has caught up, and then are nearly worth it."""
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


def test_a_way_that_is_not_allowed_is_not_taken():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY), clock)
    assert share_of(SpeculationMode.NONE, clock, policy, 64 * TRIAL, answer=0.001, gain=0.0, drafting=0.020) == 0.0


@pytest.mark.parametrize(("gain", "plain"), [(1.01, True), (1.05, False)])
def test_hints_must_bring_more_than_noise_does(gain, plain):
    selector = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    for _ in range(4):
        tokens = gain if selector.mode is SpeculationMode.DRAFT_IF_READY else 1.0
        selector.spend(tokens, 1.0)
        selector.end_trial(tokens, 1.0)
    assert (selector.mode is SpeculationMode.NONE) == plain


@pytest.mark.parametrize(
    ("right", "best"),
    [(1.0, SpeculationMode.NONE), (1.01, SpeculationMode.NONE), (1.3, SpeculationMode.WAIT_FOR_DRAFT)],
)
def test_hints_that_are_never_right_make_no_turn_a_fast_one(right, best):
    selector = ModeSelector(
        [SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.NONE], SpeculationMode.WAIT_FOR_DRAFT, PrefillCost()
    )
    ways = []
    for _ in range(40):
        ways.append(selector.mode)
        hinted = selector.mode is SpeculationMode.WAIT_FOR_DRAFT
        tokens, seconds = (right, 0.9) if hinted else (1.0, 1.0)  # the machine was fast when there were hints
        selector.spend(TRIAL * tokens, TRIAL * seconds)
        selector.end_trial(TRIAL * tokens, TRIAL * seconds, steps=TRIAL)
    assert ways.count(best) > 30


def test_a_turn_without_tokens_is_the_worst():
    selector = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    selector.spend(0.0, 1.0)
    selector.end_trial(0.0, 1.0)
    assert selector.mode is SpeculationMode.NONE
    selector.spend(1.0, 1.0)
    selector.end_trial(1.0, 1.0)
    assert selector.mode is SpeculationMode.NONE


def test_a_drafter_that_never_comes_in_time_does_not_hold_a_way():
    """Its sessions end before it has read their prompts; then hints are not asked for without end."""
    clock = Clock()
    policy = ModePolicy(clock=clock)
    work(clock, policy, 4 * TRIAL, answer=0.040, gain=0)
    ways = []
    for session in range(64 * TRIAL):
        policy.begin()
        clock.now += 0.030 + 0.005 * (policy.mode is not SpeculationMode.NONE)  # reading costs the step something
        policy.end([session + 2], 1, 1)
        ways.append(policy.mode)
    assert ways.count(SpeculationMode.NONE) > 0.4 * len(ways)
    assert ways[-1] is SpeculationMode.NONE or SpeculationMode.NONE in ways[-8 * TRIAL :]


@pytest.mark.parametrize("longest", [None, 2.0])
def test_a_session_that_its_drafter_has_left_is_not_waited_for_without_end(longest):
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
    assert policy.wait.remaining > 0, "it is drafted for again"


def test_a_drafter_that_is_measured_is_waited_for_whatever_it_costs():
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    waits = work(clock, policy, 8 * TRIAL, answer=0.9, gain=0)
    assert set(waits[2:]) == {0.9}
    assert max(work(clock, policy, 8, answer=5.0, gain=0)) == 2.0
    policy.begin()
    policy.end([1, 2], 2, 2)
    policy.received(1, fresh=True)
    assert policy.wait.remaining == 2.0  # for the other one's first answer


def test_the_first_answer_of_all_is_waited_for_too():
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    policy.begin()
    policy.end([1], 1, 1, prompts=100)
    assert policy.wait.remaining == 2.0


def test_where_nobody_ever_answers_one_step_is_held_and_no_other():
    """A target that is to wait for its drafter is asked before there is one."""
    clock = Clock()
    policy = ModePolicy(MEASURING_MODES, clock, longest=2.0)
    policy.begin()
    policy.end([1], 1, 1)
    clock.now += 1.0
    assert policy.wait.remaining == 1.0
    policy.begin()  # somebody else's prompt
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
    assert policy.wait.remaining == 2.0, "now there is one"


def test_steps_taken_at_once_count_one_by_one():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    assert policy.without_drafts, "nobody drafts"
    work(clock, policy, 4 * TRIAL, answer=1.0, gain=0, drafting=0.03)
    assert policy.mode is SpeculationMode.NONE
    assert policy.without_drafts
    selector = policy._selectors[0]
    turns, steps = selector._trials, 0
    while selector._trials == turns:  # the rest of a turn that has begun
        policy.begin()
        clock.now += 0.03
        policy.end([], 1, 1)
    turns += 1
    while selector._trials == turns:
        policy.begin()
        clock.now += 4 * 0.03
        policy.end([], 1, 4, steps=4)
        steps += 4
    assert steps == selector.steps == TRIAL
    assert policy._step_seconds == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("tokens", "best"), [(1.5, SpeculationMode.SELF_SPECULATE), (6.0, SpeculationMode.WAIT_FOR_DRAFT)]
)
def test_a_drafter_that_comes_is_weighed_against_drafts_of_its_own(tokens, best):
    clock = Clock()
    policy = ModePolicy((SpeculationMode.SELF_SPECULATE, *DRAFT_MODES), clock)
    ways = []
    for step in range(128 * TRIAL):
        hinted = policy.mode in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        if step == TRIAL or (step > TRIAL and hinted):
            policy.received(1, fresh=True)
        policy.begin(1)
        own = policy.mode is SpeculationMode.SELF_SPECULATE
        clock.now += 0.02 if own else 0.012
        policy.end(
            [1] if hinted else [], 1, 3 if own else tokens if policy.mode is SpeculationMode.WAIT_FOR_DRAFT else 1
        )
        ways.append(policy.mode)
        assert policy.drafting_paused == (
            step >= TRIAL and policy.mode not in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        )
    assert set(ways[:TRIAL]) == {SpeculationMode.SELF_SPECULATE}
    assert ways[32 * TRIAL :].count(best) > 0.9 * len(ways[32 * TRIAL :])
