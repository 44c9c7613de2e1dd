"""The source chooser: which draft source drafts for which session, by predictions, and which kind of step follows."""

from dataclasses import replace

import pytest

from outrider.serving.messages import Grammar, GrammarKind
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.modes.mode import DRAFT_MODES
from services.target.speculation.plans import LoopStep, MultiStep, SelfDraftStep, ServiceStep
from services.target.speculation.sources.base import PROBE_INTERVAL
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.target.self_speculation import LONG, self_speculating
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs compiled programs")

CYCLE_START = int(CYCLE[3])


class FixedCost(StepCost):
    """A cost model that measured steps do not correct, so that predictions do not depend on the machine."""

    def observe(self, tokens, kv_tokens, seconds):
        pass


MODEL = FixedCost({1: 1e-3, 64: 1.1e-3})  # further tokens cost little
CHEAP_COPY, EXPENSIVE_COPY = FixedCost({1: 1e-4, 64: 1e-4}), FixedCost({1: 5e-3, 64: 5e-3})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))
    return load_model(folder, self_speculation="quantized", self_speculation_format="int4")


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A target whose text repeats after 40 tokens, with a copy."""
    return load_model(
        write_cyclic_target(tmp_path_factory.mktemp("cyclic") / "target"),
        self_speculation="quantized",
        self_speculation_format="int4",
    )


def predicting(model, copy_cost, *, looks_up=False, **flags):
    """An engine that chooses by predictions from fixed costs."""
    engine = self_speculating(model, **flags)
    engine.speculation.planner.budget.cost = MODEL
    engine.speculation.chooser.source.cost = copy_cost
    engine.speculation.chooser.looks_up = looks_up
    return engine


def recorded_plans(engine):
    """A list that receives the plan of each step."""
    plans, plan = [], engine.speculation.plan

    def record(*args, **options):
        plans.append(plan(*args, **options))
        return plans[-1]

    engine.speculation.plan = record
    return plans


def kinds(plans):
    return {type(plan) for plan in plans}


# --- the model source ---


@pytest.mark.parametrize("count", [1, 3])
def test_a_source_that_is_predicted_to_pay_drafts_in_every_step(model, count):
    requests = [opening(i, [5, 6, 7 + i], max_tokens=60) for i in range(count)]
    engine = predicting(model, CHEAP_COPY)
    plans = recorded_plans(engine)
    found = run(engine, requests)
    assert found.new == run(engine_of(model), requests).new
    assert found.accepted > 0
    source = engine.speculation.chooser.source
    assert kinds(plans[:1]) == {ServiceStep}, "a step with prompts"
    assert kinds(plans[1:-1]) == {SelfDraftStep}, "the last step may have room for one token only"
    for plan in plans[1:-1]:
        assert set(plan.sources.values()) == {source}
        assert all(len(work.draft) for work in plan.works if work.chunk.session.id in plan.sources)


def test_a_source_that_is_predicted_not_to_pay_is_used_in_probes_only(model):
    engine = predicting(model, EXPENSIVE_COPY)
    plans = recorded_plans(engine)
    requests = [opening(1, [5, 6, 7], max_tokens=320)]
    expected = run(engine_of(model), requests)
    for _ in range(2):
        assert run(engine, requests).new == expected.new
    drafted = [number for number, plan in enumerate(plans) if isinstance(plan, SelfDraftStep)]
    assert drafted == [PROBE_INTERVAL, 2 * PROBE_INTERVAL + 1]
    assert kinds(plans) == {ServiceStep, SelfDraftStep}
    plans.clear()
    engine.speculation.chooser.source.cost = CHEAP_COPY
    assert run(engine, requests).new == expected.new
    assert kinds(plans[1:-1]) == {SelfDraftStep}, "each step predicts anew"


def test_a_source_is_judged_anew_when_costs_turn_against_it(model):
    engine = predicting(model, CHEAP_COPY)
    plans = recorded_plans(engine)
    engine.open(opening(1, [5, 6, 7], max_tokens=200))
    while len(plans) < 10:
        engine.step()
    assert isinstance(plans[-1], SelfDraftStep)
    engine.speculation.chooser.source.cost = EXPENSIVE_COPY
    while len(plans) < 60 and not engine.idle:
        engine.step()
    assert kinds(plans[10:]) == {ServiceStep}
    assert len(plans) > 40


# --- prompt lookup beside the model source ---

COPY = FixedCost({1: 5e-4, 64: 5e-4})  # pays, but less than a long chain of lookups


def mixed_plans(model, *, rejected_before):
    """The first two plans of a session with a match beside one without. rejected_before: lookups were rejected."""
    engine = predicting(model, COPY, looks_up=True)
    chooser = engine.speculation.chooser
    for match in range(2, 13) if rejected_before else ():
        for _ in range(200):
            chooser.lookup.observe_match(match, 8, 0, goes_on=True)
    plans = recorded_plans(engine)
    repeating = [CYCLE_START, *cycle_text(CYCLE_START, 2 * len(CYCLE))]
    requests = [opening(1, repeating, max_tokens=60), opening(2, [CYCLE_START], max_tokens=36)]
    found = run(engine, requests)
    assert found.new == {1: cycle_text(repeating[-1], 60), 2: cycle_text(CYCLE_START, 36)}
    assert kinds(plans[1:3]) == {SelfDraftStep}
    return chooser, plans[1:3]


def test_lookups_serve_sessions_with_a_likely_match_and_the_source_the_others(cyclic):
    chooser, plans = mixed_plans(cyclic, rejected_before=False)
    assert all(plan.sources == {1: chooser.lookup, 2: chooser.source} for plan in plans)
    assert max(len(work.draft) for work in plans[0].works if work.chunk.session.id == 1) > 8
    assert chooser.lookup.estimate.tried > 0
    assert chooser.source.estimate.tried > 0


def test_the_source_drafts_instead_of_unlikely_lookups(cyclic):
    chooser, plans = mixed_plans(cyclic, rejected_before=True)
    assert all(plan.sources == {1: chooser.source, 2: chooser.source} for plan in plans)


# --- sessions without drafts of the target ---


def test_no_drafts_for_grammars_or_sessions_that_allow_none(model):
    phrase = [5, 6, 7] * 9  # prompt lookup would find a match
    requests = [
        opening(1, phrase, max_tokens=60),
        replace(opening(2, phrase, max_tokens=60), max_draft_tokens=0),
        opening(3, phrase, grammar=Grammar(GrammarKind.REGEX, "[a-f]{40,60}"), max_tokens=60),
    ]
    expected = run(engine_of(model), requests).new
    engine = predicting(model, CHEAP_COPY, looks_up=True)
    plans = recorded_plans(engine)
    found = run(engine, requests)
    assert found.new == expected
    drafted = [plan for plan in plans if isinstance(plan, SelfDraftStep)]
    served = {work.chunk.session.id for plan in drafted for work in plan.works}
    assert served == {1, 2, 3}, "the sessions share steps"
    assert {session_id for plan in drafted for session_id in plan.sources} == {1}
    for plan in plans:
        assert all(not len(work.draft) for work in plan.works if work.chunk.session.id != 1)
    assert {commit.verified for i in (2, 3) for commit in found.commits[i]} == {0}


# --- kinds of steps ---


@pytest.mark.parametrize(
    ("copy_cost", "window", "count", "kind"),
    [
        (CHEAP_COPY, 0.0, 1, SelfDraftStep),
        (CHEAP_COPY, 0.0, 2, SelfDraftStep),
        (CHEAP_COPY, LONG, 1, LoopStep),
        (CHEAP_COPY, LONG, 2, SelfDraftStep),
        (EXPENSIVE_COPY, 0.0, 1, ServiceStep),
        (EXPENSIVE_COPY, 0.0, 2, ServiceStep),
        (EXPENSIVE_COPY, LONG, 1, MultiStep),
        (EXPENSIVE_COPY, LONG, 2, MultiStep),
    ],
)
def test_kinds_of_steps(model, copy_cost, window, count, kind):
    """Whether the source pays, the coalescing window and the number of sessions decide the kind of a step."""
    engine = predicting(model, copy_cost, coalesce_seconds=window)
    plans = recorded_plans(engine)
    requests = [opening(i, [5, 6, 7 + i], max_tokens=60) for i in range(count)]
    for request in requests:
        engine.open(request)
    for _ in range(3):
        assert not engine.step().failures
    assert [type(plan) for plan in plans] == [ServiceStep, kind, kind]
    chooser, service = engine.speculation.chooser, engine.speculation.service
    assert plans[0].source_of(0) is service
    assert plans[1].source_of(0) is (service if kind in (ServiceStep, MultiStep) else chooser.source)
    if kind is MultiStep:
        assert plans[1].decoding.steps > 1
    if kind is LoopStep:
        assert plans[1].source is engine.speculation.chooser.source
    engine.abort()
    engine.step()
    assert run(engine, requests).new == run(engine_of(model), requests).new


def test_proposals_of_the_draft_service_are_verified_by_a_service_step(model):
    engine = engine_of(model)
    assert engine.speculation.policy.mode in DRAFT_MODES
    plans = recorded_plans(engine)
    engine.open(opening(1, [5, 6, 7], max_tokens=20))
    engine.receive([chain(1, [5, 6, 7], [8, 9])], ())
    engine.step()
    (plan,) = plans
    assert isinstance(plan, ServiceStep)
    assert [len(work.draft) for work in plan.works] == [2]
