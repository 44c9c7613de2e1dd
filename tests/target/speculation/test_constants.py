"""What changes with each constant of waiting, budgets and plans, and of when steps are launched."""

from types import SimpleNamespace

from outrider.config import TargetConfig
from services.target.engine.launching.launch_clock import LaunchClock
from services.target.speculation.budget import Budget
from services.target.speculation.controller import Speculation
from services.target.speculation.draft_wait import longest_wait
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from services.target.speculation.multi_step import MultiStepPlanner
from services.target.speculation.planner import Planner
from services.target.speculation.sources.draft_service import DraftService
from tests.support.constants import constant_tests
from tests.support.target.planning import open_sessions, planner_of, work_of
from tests.support.target.virtual_time.drafter_clock import Clock

PACKAGE, LAUNCHING = "services.target.speculation", "services.target.engine.launching"
BENT = {1: 0.010, 4: 0.010, 96: 0.102}  # seconds of a step: from 4 tokens on, 1 ms more for each


# --- waiting ---


def waiting_policy():
    clock = Clock()
    policy = ModePolicy((SpeculationMode.WAIT_FOR_DRAFT,), clock)
    policy.received(1, fresh=True)
    policy.wait.closed(1)
    return clock, policy


def read_prompt(clock, policy, session_id, prompt):
    """A session's prompt is read, in 10 ms a token. Returns how long the next step is held for a first answer."""
    policy.begin(1)
    clock.now += 0.010 * prompt
    policy.end([session_id], 1, 1, prompts=prompt, unread={session_id: prompt})
    return policy.wait.remaining


def longest_first_wait():
    return read_prompt(*waiting_policy(), 5, prompt=1000)


def first_waits_in_vain():
    """First answers that steps are held for, of drafters that answer none."""
    clock, policy = waiting_policy()
    held = 0
    for session_id in range(5, 15):
        seconds = read_prompt(clock, policy, session_id, prompt=100)
        clock.now += seconds
        held += seconds > 0.5
        policy.begin(1)
        clock.now += 0.010
        policy.end([session_id], 1, 1, unread={session_id: 101})
        policy.wait.closed(session_id)
    return held


def waits_for_a_session_that_is_left():
    """Steps that are held for a session whose drafter answers no more."""
    clock, policy = waiting_policy()
    policy.received(2, fresh=True)
    held = 0
    for _ in range(20):
        policy.begin(1)
        clock.now += 0.030
        policy.end([2], 1, 1)
        held += policy.wait.remaining > 0
        clock.now += policy.wait.remaining
    return held


def speculation_of(sessions, **flags):
    """The controller of a target without draft sources of its own, whose steps wait for drafts."""
    planner = planner_of(BENT)
    service = DraftService(planner, sessions, 300)
    features = SimpleNamespace(asked=False, captures=False)
    modes = [SpeculationMode.WAIT_FOR_DRAFT]
    return Speculation(TargetConfig(**flags), planner, sessions, service, None, None, modes, features)


def commits_of(sessions):
    return [
        SimpleNamespace(
            session_id=number, draft_budget=1, tokens=[7], accepted=0, verified=0, source=None, base_length=9
        )
        for number in sessions
    ]


def sessions_that_are_weighed():
    """Numbers of sessions for which no step is held, because what is left of their trees promises enough."""
    weighed = []
    for count in (1, 2, 3, 4, 6, 8, 12):
        sessions = open_sessions(*[[5, 6, 7]] * count)
        speculation = speculation_of(sessions)
        wait = speculation.policy.wait
        wait.gain = SimpleNamespace(
            answered=lambda _: None,
            committed=lambda *_: None,
            worth=lambda promised, _: {one for one, tokens in promised.items() if tokens < 1.0},
        )
        speculation.service.expected = lambda _: 2.0
        for number, entry in sessions.items():
            entry.tree = [1]
            speculation.policy.received(number, fresh=True)
        speculation.policy.pace.add(1.0, 10.0)  # a step that may be held for as long as any
        speculation.settled(commits_of(sessions), count, 0, 1)
        weighed.append(wait.remaining == 0.0)
    return weighed


def longest_measured_wait():
    """Seconds for which a step is held where drafters are measured."""
    sessions = open_sessions([5, 6, 7])
    speculation = speculation_of(sessions, speculative_always=True)
    speculation.settled(commits_of(sessions), 1, 0, 1)
    return speculation.policy.wait.longest


# --- budgets and plans ---


def lowest_probability():
    """Probability below which no draft token is worth its cost, where tokens far ahead are the cheapest."""
    return Budget(StepCost({1: 0.010, 10: 0.020, 20: 0.028, 40: 0.036})).min_probability(1, 1)


def expensive_trees():
    """Whether trees are expensive, by the cost of a token in hundredths of a step."""
    costs = [{1: 0.010, 64: 0.010 * (1 + 63 * hundredth / 100)} for hundredth in range(40)]
    return [Budget(StepCost(cost)).trees_are_expensive for cost in costs]


def most_tokens():
    """Tokens of a session in a step without a flag."""
    return Planner(TargetConfig(), None, 1000).max_tokens


def plain_steps():
    sessions = open_sessions([5, 6, 7])
    planner = MultiStepPlanner(planner_of(BENT), sessions, 60.0)
    return planner.steps([work_of(sessions[1].session)])


EFFECTS = {
    "budget:TOKENS_PER_SESSION": lambda: [
        lowest_probability(),
        plain_steps(),
        Planner(TargetConfig(), None, 1000).max_tokens,
    ],
    "budget:_TREE_TOKENS": expensive_trees,
    "budget:_EXPENSIVE": expensive_trees,
    "controller:_FEW_SESSIONS": sessions_that_are_weighed,
    "draft_wait:_MAX_WAIT": lambda: longest_wait(10.0),
    "draft_wait:_MAX_WAIT_STEPS": lambda: longest_wait(0.020),
    "draft_wait:MEASURING_WAIT": longest_measured_wait,
    "draft_wait:_MAX_FIRST_WAIT": longest_first_wait,
    "draft_wait:_MAX_VAIN": first_waits_in_vain,
    "draft_wait:_MAX_MISSES": waits_for_a_session_that_is_left,
}
FIXED = {"draft_stats:LAG_BOUNDS": "the wire's histogram has these buckets"}


# --- launches ---


def launch_of(*steps, host=0.001):
    """Seconds of a step after which the one behind it is launched. steps: how long measured ones took of 10 ms."""
    clock = LaunchClock()
    for number in range(5):
        clock.launched(host * (1 + number % 2))
    for seconds in steps:
        clock.collected(seconds, 0.010)
    return clock.due(0.0, 0.010)


LAUNCHES = {
    "launch_clock:_WEIGHT": lambda: launch_of(),
    "launch_clock:_LAUNCHES": lambda: launch_of(),
    "launch_clock:_MAX_EXCESS": lambda: launch_of(0.011, 0.200),
    "launch_clock:_MARGIN": lambda: launch_of(),
}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(
    {PACKAGE: EFFECTS, LAUNCHING: LAUNCHES}, {PACKAGE: FIXED}, whole=[PACKAGE]
)
