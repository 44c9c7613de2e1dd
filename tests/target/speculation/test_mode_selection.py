"""Patience on a clock that the test winds: it waits where that pays, and goes at once where it does not."""

import pytest

from services.target.speculation.draft_wait import ALWAYS, SERVICE_MODES, DraftWait
from services.target.speculation.mode_selector import TURN, ModeSelector, PrefillCost, SpeculationMode


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def work(clock, patience, steps, *, answer, gain, step=0.030, drafting=0.0, sessions=1):
    """Steps of a session whose hints take `answer` seconds and, if awaited, bring `gain` tokens. Returns waits.

    drafting: seconds that a step takes longer because the drafter uses the machine too.
    """
    waits = []
    for _ in range(steps):
        waited = min(patience.remaining, answer)
        fresh = waited == answer and patience.remaining > 0
        clock.now += waited
        drafted = patience.way is not SpeculationMode.NONE
        if drafted:
            patience.answered(1, fresh)
        waits.append(waited)
        patience.begin()
        clock.now += step + drafting * drafted
        patience.end([1] if drafted else [], sessions, sessions * (1 + gain if fresh and drafted else 1))
    return waits


@pytest.mark.parametrize(
    ("answer", "gain", "pays"),
    [(0.001, 1, True), (0.005, 0, False), (0.025, 3, True), (0.040, 3, True), (0.040, 1, False), (0.055, 3, False)],
)
def test_it_waits_where_that_pays(answer, gain, pays):
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 4 * TURN, answer=answer, gain=gain)
    waits = work(clock, patience, 32 * TURN, answer=answer, gain=gain)
    share = sum(wait > 0 for wait in waits) / len(waits)
    assert share > 0.8 if pays else share < 0.2
    assert max(waits) <= 0.05 + 1e-9


def test_turns_are_as_quickly_told_after_years():
    contest = ModeSelector(
        (SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    assert contest.steps == 4
    contest._turns = 1 << 40
    assert contest.steps == TURN


@pytest.mark.parametrize("loser", [SpeculationMode.DRAFT_IF_READY, SpeculationMode.SELF_SPECULATE])
def test_what_has_lost_for_years_is_tried_all_the_same(loser):
    contest = ModeSelector((loser, SpeculationMode.NONE), loser, PrefillCost())
    tried = 0
    for _ in range(20_000):
        tried += contest.way is loser
        seconds = 0.001 * contest.steps * (1.2 if contest.way is loser else 1.0)
        contest.spend(contest.steps, seconds)
        contest.end_turn(contest.steps, seconds)
    assert tried > 600


@pytest.mark.parametrize(("step", "tokens", "pays"), [(0.05, 2, False), (0.05, 8, True), (0.03, 2, False)])
def test_steps_that_are_long_by_nature_count_as_long(step, tokens, pays):
    """However few tokens those of another way take: no other process has held them up."""
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)
    ways = []
    for _ in range(64 * TURN):
        ways.append(patience.way)
        patience.begin(1)
        clock.now += step if patience.way is SpeculationMode.SELF_SPECULATE else 0.01
        patience.end([], 1, tokens if patience.way is SpeculationMode.SELF_SPECULATE else 1)
    late = ways[32 * TURN :]
    assert late.count(SpeculationMode.SELF_SPECULATE if pays else SpeculationMode.NONE) > 0.8 * len(late)


def test_a_step_that_was_held_up_counts_as_a_usual_one():
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)
    for number in range(64 * TURN):
        patience.begin(1)
        clock.now += (0.02 if patience.way is SpeculationMode.SELF_SPECULATE else 0.03) + 5.0 * (number % 100 == 50)
        patience.end([], 1, 1)
    rates = {way: measured.tokens / measured.seconds for way, measured in patience._contests[0]._measured.items()}
    assert rates == pytest.approx({SpeculationMode.SELF_SPECULATE: 50.0, SpeculationMode.NONE: 1 / 0.03}, rel=0.2)


def test_it_changes_its_mind():
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 64 * TURN, answer=0.004, gain=0)
    waits = work(clock, patience, 160 * TURN, answer=0.001, gain=2)[-16 * TURN :]
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


def test_without_drafter_or_sessions_nothing_is_awaited():
    clock = Clock()
    patience = DraftWait(clock=clock)
    for _ in range(3 * TURN):
        clock.now += 0.03
        patience.begin()
        patience.end([1, 2], 2, 2)
        assert patience.remaining == 0.0
    for _ in range(2):  # the first one may have begun with a pause
        patience.answered(1, fresh=True)
        clock.now += 0.03
        patience.end([1, 2], 2, 2)
    assert patience.remaining > 0.0
    patience.forget(1)
    assert patience.remaining == 0.0


def share_of(way, clock, patience, steps, **kwargs):
    count = 0
    for _ in range(steps):
        count += patience.way is way
        work(clock, patience, 1, **kwargs)
    return count / steps


def test_a_drafter_that_costs_more_than_it_brings_is_told_to_rest():
    clock = Clock()
    patience = DraftWait(clock=clock)
    dear = {"answer": 0.001, "gain": 0.2, "drafting": 0.020}
    work(clock, patience, 16 * TURN, **dear)
    assert share_of(SpeculationMode.NONE, clock, patience, 256 * TURN, **dear) > 0.95
    cheap = {**dear, "drafting": 0.0}
    work(clock, patience, 256 * TURN, **cheap)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 64 * TURN, **cheap) > 0.85


def test_each_load_has_its_own_answer():
    clock = Clock()
    patience = DraftWait(clock=clock)
    for _ in range(20):
        few = share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 8 * TURN, answer=0.001, gain=1.0)
        many = share_of(
            SpeculationMode.NONE, clock, patience, 8 * TURN, answer=0.001, gain=0.2, drafting=0.040, sessions=8
        )
    assert min(few, many) > 0.8


def test_what_does_not_pay_for_few_is_no_first_choice_for_many():
    """Hints that are far behind at one session are tried at eight, and at four, after a pause; then they are tried."""
    clock = Clock()
    patience = DraftWait(clock=clock)
    dear = {"answer": 0.001, "gain": 0.2, "drafting": 0.060}
    work(clock, patience, 16 * TURN, **dear)
    for sessions in (8, 4):
        assert share_of(SpeculationMode.NONE, clock, patience, 8 * TURN, **dear, sessions=sessions) > 0.98
    assert 0.98 < share_of(SpeculationMode.NONE, clock, patience, 999 * TURN, **dear, sessions=8) < 1.0


@pytest.mark.parametrize(("gain", "at_once"), [(3.0, True), (1.0, False), (0.2, False)])
def test_many_sessions_try_hints_at_once_where_few_have_gained_much(gain, at_once):
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 16 * TURN, answer=0.001, gain=gain)
    begun = clock.now
    waits = work(clock, patience, 8 * TURN, answer=0.001, gain=gain, sessions=8)
    assert (sum(wait > 0 for wait in waits) > 0.5 * len(waits)) == at_once
    while clock.now < begun + 35:
        work(clock, patience, 1, answer=0.001, gain=gain, sessions=8)
    waits = work(clock, patience, 64 * TURN, answer=0.001, gain=gain, sessions=8)
    assert sum(wait > 0 for wait in waits) > 0.8 * len(waits)


@pytest.mark.parametrize("dear", [True, False])
def test_hints_that_are_dear_are_tried_once_a_load_has_lasted(dear):
    clock = Clock()
    patience = DraftWait(clock=clock, dear=lambda: dear)
    begun = clock.now
    work(clock, patience, 1, answer=0.001, gain=2.0)
    assert (share_of(SpeculationMode.NONE, clock, patience, 16 * TURN, answer=0.001, gain=2.0) > 0.98) == dear
    while clock.now < begun + 35:
        work(clock, patience, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 64 * TURN, answer=0.001, gain=2.0) > 0.8


def after_the_first_trial(first, then, drafting=0.0):
    """Shares of hints in ten seconds behind the first 100 steps with them, of eight sessions; and the time lost there.

    first, then: tokens that hints bring in those steps, while their scores are not calibrated, and later.
    drafting: seconds that each of these steps takes longer, and the very first one ten times of it
    """
    clock = Clock()
    patience = DraftWait(clock=clock)
    steps = hinted = 0
    lost, begun = 0.0, None
    while begun is None or clock.now < begun + 10:
        hints = patience.way is not SpeculationMode.NONE
        before, gain = clock.now, first if hinted <= 18 else then
        dear = drafting * (10 if hinted == 1 else 1)  # of the steps before, one was the load's first
        work(clock, patience, 1, answer=0.0, gain=gain, drafting=dear, sessions=8, step=0.010)
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
    patience = DraftWait(clock=clock)
    work(clock, patience, 1, answer=0.001, gain=1.0, sessions=8)
    assert share_of(SpeculationMode.NONE, clock, patience, 40 * TURN, answer=0.001, gain=1.0, sessions=8) == 1.0
    work(clock, patience, 40 * TURN, answer=0.001, gain=1.0, sessions=8)
    assert (
        share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 64 * TURN, answer=0.001, gain=1.0, sessions=8) > 0.6
    )


def test_a_load_that_grows_is_met_while_prompts_are_read():
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 4, answer=0.001, gain=0.2)
    ways = []
    for sessions in (1, 2, 4, 8, 7, 8):
        patience.begin()
        clock.now += 0.1
        patience.end([1], sessions, sessions, prompts=50)
        ways.append(patience.way)
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
    patience = DraftWait(clock=clock)
    work(clock, patience, 64 * TURN, answer=0.001, gain=0.5)
    assert patience.way is SpeculationMode.WAIT_FOR_DRAFT
    ways = []
    for reading in (1, 0):
        for _ in range(4):
            patience.begin(8)
            ways.append(patience.way)
            clock.now += 0.1
            patience.end([1], 1, 1, prompts=50 * reading)  # some wait for pages, and have nothing to read yet
            ways.append(patience.way)
    assert set(ways) == {SpeculationMode.NONE}
    for _ in range(2):
        patience.begin(1)
        patience.end([1], 1, 1)
    assert patience.way is SpeculationMode.WAIT_FOR_DRAFT


def test_of_two_ways_with_hints_one_that_is_hopeless_speaks_for_both():
    contest = ModeSelector(SERVICE_MODES, SpeculationMode.WAIT_FOR_DRAFT, PrefillCost())
    taken = []
    for _ in range(12):
        taken.append(contest.way)
        tokens, seconds = (1.2, 2.0) if contest.way is not SpeculationMode.NONE else (1.0, 1.0)
        contest.spend(tokens, seconds)
        contest.end_turn(tokens, seconds)
    assert taken == [SpeculationMode.WAIT_FOR_DRAFT] + 11 * [SpeculationMode.NONE]
    assert contest.hopeless == pytest.approx(2.0 - 1.2)


def test_a_way_whose_first_turn_went_wrong_is_tried_again_soon():
    """The draft compiles its programs, or other processes start, while hints are tried for the first time."""
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 3 * TURN, answer=0.001, gain=2.0, drafting=1.0)
    assert patience.way is SpeculationMode.NONE
    begun = clock.now
    while clock.now < begun + 10:
        work(clock, patience, 1, answer=0.001, gain=2.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 8 * TURN, answer=0.001, gain=2.0) > 0.8


def test_what_is_done_once_is_no_measure_of_a_load():
    """The draft's first rounds touch everything for the first time, and compete with the target's steps."""
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 2, answer=0.001, gain=2.0, drafting=1.0)
    assert share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, 4 * TURN, answer=0.001, gain=2.0) > 0.7


def test_steps_with_prompts_in_them_are_no_measure():
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 64 * TURN, answer=0.001, gain=1.0)
    shares = []
    for _ in range(16):
        clock.now += 3.0
        patience.end([1], 1, 1, prompts=100)
        shares.append(share_of(SpeculationMode.WAIT_FOR_DRAFT, clock, patience, TURN, answer=0.001, gain=1.0))
    assert sum(shares) > 0.8 * len(shares)


@pytest.mark.parametrize(("rows", "plain"), [(0, False), (2000, True)])
def test_prompts_that_take_longer_because_of_the_drafter_count_too(rows, plain):
    """Hints bring a tenth while no prompts are read; these take half as long again where they are drafted for."""
    clock = Clock()
    patience = DraftWait(clock=clock)
    ways = []
    for _ in range(200):
        if rows:
            patience.begin()
            clock.now += rows * (0.0002 if patience.way is SpeculationMode.NONE else 0.0003)
            patience.end([1], 0, 0, prompts=rows)
        ways.append(share_of(SpeculationMode.NONE, clock, patience, TURN, answer=0.001, gain=0.15))
    share = sum(ways[50:]) / len(ways[50:])
    assert share > 0.9 if plain else share < 0.1


def test_prompts_that_happen_to_be_long_tell_nothing_of_ways_without_drafters():
    """Nobody but the target reads prompts where it works plainly, or drafts itself."""
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)
    ways = []
    for _ in range(100):
        patience.begin()
        clock.now += 2000 * (0.0003 if patience.way is SpeculationMode.NONE else 0.0002)
        patience.end([1], 0, 0, prompts=2000)
        for _ in range(TURN):
            ways.append(patience.way)
            patience.begin()
            clock.now += 0.030 if patience.way is SpeculationMode.NONE else 0.066
            patience.end([1], 1, 1 if patience.way is SpeculationMode.NONE else 2)
    assert ways.count(SpeculationMode.NONE) > 0.9 * len(ways)


def test_tokens_beside_prompts_take_the_time_of_as_many_tokens():
    """Drafts of its own bring two tokens in twice a plain step's time, but beside prompts it does not draft."""
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)
    for _ in range(100):
        for prompts in (0, 0, 0, 500):
            drafts = patience.way is SpeculationMode.SELF_SPECULATE and not prompts
            patience.begin()
            clock.now += 0.030 * (1 + drafts) + 0.0002 * prompts
            patience.end([1], 1, 1 + drafts, prompts=prompts)
    rows_a_token = patience._prompts._all_rows / patience._prompts._tokens
    assert patience._prompts.seconds(SpeculationMode.SELF_SPECULATE) == pytest.approx(0.0002 * rows_a_token)


@pytest.mark.parametrize("dear", [{"answer": 0.025, "drafting": 0.010}, {"answer": 0.030, "drafting": 0.060}])
def test_trials_of_ways_that_are_behind_take_a_hundredth_of_the_time_at_most(dear):
    clock, steps = Clock(), 1024 * TURN
    patience = DraftWait(clock=clock)
    work(clock, patience, 64 * TURN, gain=0.2, **dear)
    before = clock.now
    plain = share_of(SpeculationMode.NONE, clock, patience, steps, gain=0.2, **dear)
    taken = clock.now - before
    assert taken < 1.01 * 0.030 * steps
    assert plain < 1.0  # they are tried, though


def test_what_a_drafter_has_to_read_first_counts_as_the_cost_of_a_trial():
    """After a rest the steps of a trial take long until the drafter has caught up, and then are nearly worth it."""
    clock, steps = Clock(), 1024 * TURN
    patience = DraftWait(clock=clock)
    lost, behind = 0.0, 40
    for _ in range(steps):
        if patience.way is SpeculationMode.NONE:
            behind = 40
        reading = 0.020 if behind > 0 and patience.way is not SpeculationMode.NONE else 0.0
        behind -= reading > 0
        work(clock, patience, 1, answer=0.001, gain=0.9, drafting=0.030 + reading)
        lost += reading
    assert 0 < lost < 0.01 * (clock.now - 100)


def test_a_way_that_is_not_allowed_is_not_taken():
    clock = Clock()
    patience = DraftWait((SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY), clock)
    assert share_of(SpeculationMode.NONE, clock, patience, 64 * TURN, answer=0.001, gain=0.0, drafting=0.020) == 0.0


@pytest.mark.parametrize(("gain", "plain"), [(1.01, True), (1.05, False)])
def test_hints_must_bring_more_than_noise_does(gain, plain):
    contest = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    for _ in range(4):
        tokens = gain if contest.way is SpeculationMode.DRAFT_IF_READY else 1.0
        contest.spend(tokens, 1.0)
        contest.end_turn(tokens, 1.0)
    assert (contest.way is SpeculationMode.NONE) == plain


@pytest.mark.parametrize(
    ("right", "best"),
    [(1.0, SpeculationMode.NONE), (1.01, SpeculationMode.NONE), (1.3, SpeculationMode.WAIT_FOR_DRAFT)],
)
def test_hints_that_are_never_right_make_no_turn_a_fast_one(right, best):
    contest = ModeSelector(
        [SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.NONE], SpeculationMode.WAIT_FOR_DRAFT, PrefillCost()
    )
    ways = []
    for _ in range(40):
        ways.append(contest.way)
        hinted = contest.way is SpeculationMode.WAIT_FOR_DRAFT
        tokens, seconds = (right, 0.9) if hinted else (1.0, 1.0)  # the machine was fast when there were hints
        contest.spend(TURN * tokens, TURN * seconds)
        contest.end_turn(TURN * tokens, TURN * seconds, steps=TURN)
    assert ways.count(best) > 30


def test_a_turn_without_tokens_is_the_worst():
    contest = ModeSelector(
        [SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE], SpeculationMode.DRAFT_IF_READY, PrefillCost()
    )
    contest.spend(0.0, 1.0)
    contest.end_turn(0.0, 1.0)
    assert contest.way is SpeculationMode.NONE
    contest.spend(1.0, 1.0)
    contest.end_turn(1.0, 1.0)
    assert contest.way is SpeculationMode.NONE


def test_a_drafter_that_never_comes_in_time_does_not_hold_a_way():
    """Its sessions end before it has read their prompts; then hints are not asked for without end."""
    clock = Clock()
    patience = DraftWait(clock=clock)
    work(clock, patience, 4 * TURN, answer=0.040, gain=0)
    ways = []
    for session in range(64 * TURN):
        patience.begin()
        clock.now += 0.030 + 0.005 * (patience.way is not SpeculationMode.NONE)  # reading costs the step something
        patience.end([session + 2], 1, 1)
        ways.append(patience.way)
    assert ways.count(SpeculationMode.NONE) > 0.4 * len(ways)
    assert ways[-1] is SpeculationMode.NONE or SpeculationMode.NONE in ways[-8 * TURN :]


@pytest.mark.parametrize("longest", [None, 2.0])
def test_a_session_that_its_drafter_has_left_is_not_waited_for_without_end(longest):
    clock = Clock()
    patience = DraftWait(ALWAYS, clock, longest)
    waits = []
    for step in range(20):
        patience.begin(2)
        clock.now += 0.030
        patience.end([1, 2], 2, 2)
        patience.answered(1, fresh=True)
        if not 4 <= step < 16:
            patience.answered(2, fresh=True)
        waits.append(patience.remaining)
        clock.now += waits[-1]
    assert [wait > 0 for wait in waits] == [False] * 4 + [True] * 3 + [False] * 13
    patience.begin(2)
    patience.end([1, 2], 2, 2)
    patience.answered(1, fresh=True)
    assert patience.remaining > 0, "it is drafted for again"


def test_a_drafter_that_is_measured_is_waited_for_whatever_it_costs():
    clock = Clock()
    patience = DraftWait(ALWAYS, clock, longest=2.0)
    waits = work(clock, patience, 8 * TURN, answer=0.9, gain=0)
    assert set(waits[2:]) == {0.9}
    assert max(work(clock, patience, 8, answer=5.0, gain=0)) == 2.0
    patience.begin()
    patience.end([1, 2], 2, 2)
    patience.answered(1, fresh=True)
    assert patience.remaining == 2.0  # for the other one's first answer


def test_the_first_answer_of_all_is_waited_for_too():
    clock = Clock()
    patience = DraftWait(ALWAYS, clock, longest=2.0)
    patience.begin()
    patience.end([1], 1, 1, prompts=100)
    assert patience.remaining == 2.0


def test_where_nobody_ever_answers_one_step_is_held_and_no_other():
    """A target that is to wait for its drafter is asked before there is one."""
    clock = Clock()
    patience = DraftWait(ALWAYS, clock, longest=2.0)
    patience.begin()
    patience.end([1], 1, 1)
    clock.now += 1.0
    assert patience.remaining == 1.0
    patience.begin()  # somebody else's prompt
    patience.end([1], 1, 1)
    assert patience.remaining == 2.0
    clock.now += 2.0
    for _ in range(3):
        patience.begin()
        patience.end([1], 1, 1)
        assert patience.remaining == 0.0
    patience.answered(1, fresh=True)
    patience.begin()
    patience.end([1], 1, 1)
    assert patience.remaining == 2.0, "now there is one"


def test_steps_taken_at_once_count_one_by_one():
    clock = Clock()
    patience = DraftWait((SpeculationMode.DRAFT_IF_READY, SpeculationMode.NONE), clock)
    assert patience.unhinted, "nobody drafts"
    work(clock, patience, 4 * TURN, answer=1.0, gain=0, drafting=0.03)
    assert patience.way is SpeculationMode.NONE
    assert patience.unhinted
    contest = patience._contests[0]
    turns, steps = contest._turns, 0
    while contest._turns == turns:  # the rest of a turn that has begun
        patience.begin()
        clock.now += 0.03
        patience.end([], 1, 1)
    turns += 1
    while contest._turns == turns:
        patience.begin()
        clock.now += 4 * 0.03
        patience.end([], 1, 4, steps=4)
        steps += 4
    assert steps == contest.steps == TURN
    assert patience._computing == pytest.approx(0.03)


@pytest.mark.parametrize("gain", [0.5, 1.5])
def test_drafts_of_its_own_are_weighed_without_a_drafter(gain):
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)
    assert patience.way is SpeculationMode.SELF_SPECULATE
    ways = []
    for _ in range(64 * TURN):
        own = patience.way is SpeculationMode.SELF_SPECULATE
        patience.begin(1)
        clock.now += 0.02 if own else 0.01
        patience.end([1], 1, round(2 * gain) if own else 1)
        ways.append(patience.way)
        assert not patience.unwanted, "until a drafter answers, it is asked"
        assert patience.remaining == 0.0
    assert ways.count(SpeculationMode.SELF_SPECULATE if gain > 1 else SpeculationMode.NONE) > 0.9 * len(ways)


def test_many_that_come_with_prompts_begin_without_drafts_of_their_own():
    clock = Clock()
    patience = DraftWait((SpeculationMode.SELF_SPECULATE, SpeculationMode.NONE), clock)

    def step(sessions, prompts=0):
        patience.begin(sessions)
        way = patience.way
        clock.now += 0.01 * (1 if way is SpeculationMode.NONE else 3)
        patience.end(range(sessions), sessions, sessions * (1 if way is SpeculationMode.NONE else 2), prompts=prompts)
        return way

    assert {step(2) for _ in range(4)} == {SpeculationMode.SELF_SPECULATE}
    assert {step(16, prompts=256) for _ in range(100)} == {SpeculationMode.NONE}
    ways = [step(16) for _ in range(64 * TURN)]
    assert SpeculationMode.SELF_SPECULATE in ways[: 2 * TURN], "it is tried as soon as steps can be measured"
    assert ways.count(SpeculationMode.NONE) > 0.9 * len(ways)


@pytest.mark.parametrize(
    ("tokens", "best"), [(1.5, SpeculationMode.SELF_SPECULATE), (6.0, SpeculationMode.WAIT_FOR_DRAFT)]
)
def test_a_drafter_that_comes_is_weighed_against_drafts_of_its_own(tokens, best):
    clock = Clock()
    patience = DraftWait(tuple(SpeculationMode), clock)
    ways = []
    for step in range(128 * TURN):
        hinted = patience.way in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        if step == TURN or (step > TURN and hinted):
            patience.answered(1, fresh=True)
        patience.begin(1)
        own = patience.way is SpeculationMode.SELF_SPECULATE
        clock.now += 0.02 if own else 0.012
        patience.end(
            [1] if hinted else [], 1, 3 if own else tokens if patience.way is SpeculationMode.WAIT_FOR_DRAFT else 1
        )
        ways.append(patience.way)
        assert patience.unwanted == (
            step >= TURN and patience.way not in (SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY)
        )
    assert ways[: TURN // 2].count(SpeculationMode.NONE) < TURN // 2
    assert ways[32 * TURN :].count(best) > 0.9 * len(ways[32 * TURN :])
