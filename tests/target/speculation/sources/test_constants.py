"""What changes with each constant of the draft sources."""

from types import SimpleNamespace

import numpy as np

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources.draft_service import DraftService
from services.target.speculation.sources.head_estimates import HeadEstimates
from services.target.speculation.sources.local_eagle_head import LocalEagleHead
from services.target.speculation.sources.prompt_lookup import PromptLookup, find
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from services.target.step.programs import LoopIteration
from tests.support.constants import constant_tests
from tests.support.target.planning import demand_of, open_sessions, planner_of, work_of

PACKAGE = "services.target.speculation.sources"
CHEAP = {1: 0.010, 64: 0.011}  # seconds of a step by its tokens: further ones cost little
PROMPT = [5, 6, 7] * 4


def copy_of(cost=CHEAP, **options):
    """A quantized self-draft, with one session."""
    return QuantizedSelfDraft(None, None, planner_of(cost, **options), open_sessions(PROMPT))


def head_of(cost=CHEAP):
    """A local EAGLE head, with one session."""
    model, prefix = SimpleNamespace(device="cpu"), PrefixCache(PageAllocator(64, 16))
    return LocalEagleHead(model, None, None, prefix, planner_of(cost), open_sessions(PROMPT))


def loop_of(source):
    """Iterations of a source's fused loop."""
    return source.loop(work_of(open_sessions(PROMPT)[1].session), 1.0).steps


def acceptance_of_copy(accepted, rejected):
    """Acceptance rate of a copy, after chains that were accepted and chains that were rejected."""
    source = copy_of()
    for number in range(accepted + rejected):
        source.observe(1, range(4), range(4 * (number < accepted)), goes_on=True)
    return source.acceptance


def most_expensive(source_of, set_cost):
    """At how many hundredths of a plain step drafting still pays."""
    source = source_of()
    plain = StepCost(CHEAP)
    paying = 0
    for hundredth in range(1, 400):
        set_cost(source, plain, hundredth / 100)
        paying += source.exceeds_plain(1, 0)
    return paying


def most_expensive_copy():
    return most_expensive(copy_of, lambda source, plain, share: setattr(source, "cost", plain.scaled(share)))


def probes():
    """Steps of many in which a copy drafts that does not pay."""
    cost = {1: 0.010, 64: 0.640}
    source = copy_of(cost)
    source.cost = StepCost(cost)
    return [step for step in range(2000) if source.pays(1, 0)]


def estimates_of(sessions=None, cost=CHEAP):
    return HeadEstimates(planner_of(cost), sessions or open_sessions(PROMPT))


def measured_head(written):
    """Cost of drafting after fused loops. written: rows that the head wrote first in each iteration."""
    estimates = estimates_of()
    for rows in written:
        iterations = [LoopIteration(rows, 3, 3, 2, 3, 0.001 * rows, 0.01, [0.5] * 3, 9)]
        estimates.observe_iterations(iterations, greedy=True, goes_on=True)
    return estimates.drafting_cost(1).seconds(3)


def lookup_of(cost=CHEAP, text=PROMPT):
    """A lookup in the text of one session, and a step of it."""
    sessions = open_sessions(text)
    return PromptLookup(planner_of(cost), sessions), demand_of(sessions)


def drafted_by_match():
    """Draft tokens of texts whose last tokens, one to five of them, occurred before."""
    lengths = []
    for match in range(1, 6):
        text = [50, *range(60, 60 + match), 7, 8, 9, 51, *range(60, 60 + match)]
        lengths.append(len(find(np.array(text, np.uint32), 4)[1]))
    return lengths


def longest_match():
    text = np.array([*range(100), *range(100)], np.uint32)
    return find(text, 4)[0]


def match_among_places():
    """The longest match of a text whose older occurrences are the longer ones."""
    end, text = list(range(40)), []
    for match in range(24, 2, -1):
        text += [99, *end[len(end) - 2 - match // 2 :], 98]
    return find(np.array(text + end, np.uint32), 4)[0]


def acceptance_of_lookup(accepted=4, rejected=4, judged=0):
    """Acceptance rate of a match length, after chains, and steps in which lookups were judged."""
    lookup, demand = lookup_of()
    for number in range(accepted + rejected):
        lookup.observe_match(3, 4, 4 * (number < accepted), goes_on=True)
    for _ in range(judged):
        lookup.judge(demand)
    return lookup.rate(3)


def most_expensive_lookup():
    """The shortest match that pays, by the cost of a token in hundredths of a plain step."""
    shortest = []
    for hundredth in range(0, 100, 2):
        lookup, demand = lookup_of({1: 0.010, 64: 0.010 * (1 + 63 * hundredth / 100)})
        lookup.judge(demand)
        shortest.append(lookup.min_match)
    return shortest


def throughput_of_long_chains():
    """Tokens per second with a copy that costs next to nothing, and is always right."""
    source = copy_of({1: 0.010, 64: 0.010})
    source.cost = StepCost({1: 1e-6})
    source.observe(1, range(1000), range(1000), goes_on=True)
    return source.throughput(1, 0)


def longest_unread(*, fed):
    """The longest session that a late draft is asked to read for ten last tokens. fed: with hidden states."""
    for length in range(10, 1000, 10):
        sessions = open_sessions([5] * length)
        service = DraftService(planner_of(CHEAP, room=10), sessions, 300)
        service.opened(1)
        sessions[1].session.drafting.paused = True
        service.budget(sessions[1], paused=False, unread=True, fed=fed)
        if sessions[1].session.drafting.paused:
            return length
    raise AssertionError("it reads any length")


EFFECTS = {
    "base:MAX_CHAIN": throughput_of_long_chains,
    "base:MAX_ITERATIONS": lambda: [loop_of(head_of()), loop_of(copy_of())],
    "base:MIN_SPEEDUP": most_expensive_lookup,
    "base:PROBE_INTERVAL": probes,
    "draft_service:_READ_PER_TOKEN": lambda: longest_unread(fed=True),
    "draft_service:_READ_PER_TOKEN_ALONE": lambda: longest_unread(fed=False),
    "head_estimates:USUAL_ROWS": lambda: measured_head([1, 2, 4, 8, 16]),
    "head_estimates:_NEXT_RATE": lambda: estimates_of().token_value([work_of(open_sessions(PROMPT)[1].session)]).next,
    "head_estimates:_PRIOR_COST": lambda: estimates_of().drafting_cost(1).seconds(3),
    "head_estimates:_PRIOR_CHAINS": lambda: estimates_of().throughput(1, 0),
    "prompt_lookup:MIN_MATCH": drafted_by_match,
    "prompt_lookup:_MAX_MATCH": longest_match,
    "prompt_lookup:_MAX_PLACES": match_among_places,
    "prompt_lookup:_FADE": lambda: acceptance_of_lookup(judged=20),
    "prompt_lookup:_PRIORS": lambda: acceptance_of_lookup(0, 0),
    "quantized_self_draft:_PRIOR_RATE": lambda: acceptance_of_copy(1, 0),
    "quantized_self_draft:_PRIOR_COST": lambda: copy_of().throughput(1, 0),
    "quantized_self_draft:QuantizedSelfDraft.min_speedup": most_expensive_copy,
}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(
    {PACKAGE: EFFECTS}, whole=[PACKAGE]
)
