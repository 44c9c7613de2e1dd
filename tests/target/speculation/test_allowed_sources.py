"""Sessions that allow some draft sources only: no other one drafts for them, and their texts stay the same."""

from dataclasses import replace
from itertools import chain as joined
from itertools import combinations

import pytest

from outrider.config import TargetConfig
from outrider.speculation.draft_source import ALL_SOURCES, SourceKind
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu import library
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.policy import ModePolicy
from services.target.speculation.plans import LoopStep, MixedStep, MultiStep
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.target.self_speculation import LONG, PausedPolicy, with_head

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs compiled programs")

DRAFT, LOOKUP, HEAD, QUANTIZED = SourceKind
CHOICES = [frozenset(some) for some in joined.from_iterable(combinations(SourceKind, n) for n in range(1, 5))]
START = int(CYCLE[3])
REPEATING = [START, *cycle_text(START, 2 * len(CYCLE))]  # prompt lookup finds a match at once


class FixedCost(StepCost):
    """A cost model that measured steps do not correct."""

    def observe(self, tokens, kv_tokens, seconds):
        pass


@pytest.fixture(scope="module")
def cyclic(tmp_path_factory):
    """A target whose text repeats, with a quantized copy."""
    folder = write_cyclic_target(tmp_path_factory.mktemp("cyclic") / "target")
    return load_model(folder, self_speculation="quantized", self_speculation_format="int4")


@pytest.fixture(scope="module")
def headed(pair):
    target, folder, _ = pair
    return with_head(target, folder)


def speculating(model, window=0.0, modes=tuple(SpeculationMode)):
    """An engine with all modes, whose own sources are predicted to pay."""
    small = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": window}
    engine = TargetEngine(model, TargetConfig(**small), modes)
    engine.speculation.planner.budget.cost = FixedCost({1: 1e-3, 64: 1.1e-3})
    engine.speculation.chooser.always = True
    if model.copied:
        engine.speculation.chooser.source.cost = FixedCost({1: 1e-4, 64: 1e-4})
    return engine


def wanting_drafts(model):
    """The same in a mode that verifies proposals."""
    engine = speculating(model)
    engine.speculation.policy = policy = PausedPolicy()
    policy.want_drafts()
    return engine


def right(expected, prompts):
    """Proposals of the next three tokens of each session, in its own text."""

    def propose(session_id, path):
        behind = len(path) - prompts[session_id]
        following = expected[session_id][behind : behind + 3]
        return [chain(session_id, path, following)] if following else []

    return propose


def sessions(choices, prompt=REPEATING, max_tokens=40):
    return [
        replace(opening(i, prompt, SamplingParams(0.7 * (i % 2), seed=i), max_tokens=max_tokens), draft_sources=allowed)
        for i, allowed in enumerate(choices)
    ]


def check(engine, requests, plain, available):
    """Run with proposals for all sessions. Returns the sources that verified tokens, by session."""
    expected = run(engine_of(plain), requests)
    found = run(engine, requests, right(expected.new, {r.session_id: r.prompt_length for r in requests}))
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    verified = {}
    for request in requests:
        commits = found.commits[request.session_id]
        assert all(bool(commit.verified) == bool(commit.source) for commit in commits)
        assert request.max_draft_tokens != 0 or not any(commit.verified for commit in commits)
        verified[request.session_id] = {SourceKind(commit.source) for commit in commits if commit.verified}
        assert verified[request.session_id] <= request.draft_sources & available
        if DRAFT not in request.draft_sources:
            assert {commit.draft_budget for commit in commits} == {0}
    return verified


@pytest.mark.parametrize("window", [0.0, LONG])
@pytest.mark.parametrize("allowed", CHOICES, ids=lambda allowed: "+".join(kind.label for kind in sorted(allowed)))
def test_only_allowed_sources_draft_for_a_session(cyclic, headed, allowed, window):
    """Also in fused loops, and in multi-step decoding."""
    for model, own in ((cyclic, {LOOKUP, QUANTIZED}), (headed, {LOOKUP, HEAD})):
        prompt = REPEATING if model is cyclic else [5, 6, 7]
        verified = check(speculating(model, window), sessions([allowed], prompt), model, own | {DRAFT})
        if allowed & (own - {LOOKUP}):
            assert verified[0] & own, "a model source drafts in every step"


@pytest.mark.parametrize("make", [speculating, wanting_drafts])
def test_a_batch_of_all_choices(cyclic, make):
    """In one batch: each choice of sources, twice, and sessions without draft tokens."""
    requests = sessions([*CHOICES, *CHOICES, ALL_SOURCES, ALL_SOURCES])
    requests[-2:] = [replace(request, max_draft_tokens=0) for request in requests[-2:]]
    verified = check(make(cyclic), requests, cyclic, {DRAFT, LOOKUP, QUANTIZED})
    for request in requests[:-2]:
        if {QUANTIZED} == request.draft_sources & {DRAFT, LOOKUP, QUANTIZED}:
            assert verified[request.session_id] == {QUANTIZED}
        if request.draft_sources == {LOOKUP}:
            assert verified[request.session_id] == {LOOKUP}
        if make is wanting_drafts and request.draft_sources & {DRAFT, LOOKUP, QUANTIZED} == {DRAFT}:
            assert verified[request.session_id] == {DRAFT}


@pytest.mark.parametrize("made", ["cyclic", "headed"])
def test_sources_of_the_target_draft_where_no_proposal_comes(made, request):
    """In a mode that verifies proposals, too: a trial of it costs no more than the fused loops."""
    model = request.getfixturevalue(made)
    prompt = [5, 6, 7]
    opened = sessions([ALL_SOURCES], prompt)
    found = run(wanting_drafts(model), opened)
    assert found.new == run(engine_of(model), opened).new
    assert {commit.source for commit in found.commits[0] if commit.verified} & {QUANTIZED, HEAD}


@pytest.mark.parametrize(("score", "verified"), [(-0.01, DRAFT), (-2.0, QUANTIZED)])
def test_a_proposal_is_verified_where_it_promises_more_than_the_model_source(cyclic, score, verified):
    engine = wanting_drafts(cyclic)
    chooser = engine.speculation.chooser
    chooser.looks_up, chooser.source.cost = False, FixedCost({1: 3e-4, 64: 3e-4})
    engine.open(sessions([ALL_SOURCES])[0])
    engine.step()
    session = engine.sessions.by_id[0].session
    proposed = chain(0, session.tokens.tolist(), cycle_text(int(session.tokens[-1]), 4), score)
    engine.receive([proposed], ())
    plan = engine.plan()
    assert plan.source_of(0).kind is verified
    assert len(plan.works[0].draft)


def test_a_mixed_step_teaches_each_source_its_own(cyclic):
    engine = wanting_drafts(cyclic)
    requests = sessions([frozenset({DRAFT}), frozenset({QUANTIZED})])
    plans, plan = [], engine.speculation.plan
    engine.speculation.plan = lambda *args, **options: plans.append(plan(*args, **options)) or plans[-1]
    check(engine, requests, cyclic, {DRAFT, QUANTIZED})
    assert type(plans[0]) is type(plans[1]) is MixedStep
    assert engine.speculation.chooser.source.estimate.tried > 4
    overall = engine.speculation.service.calibrations.overall._estimate
    assert overall.tried > 10, "proposals of the one session"
    assert engine.speculation.service.stats.load().received_tokens > 0


def test_multi_step_decoding_goes_on_where_lookups_are_not_allowed(cyclic):
    """A match ends a program of several steps only in sessions that allow prompt lookup."""
    lengths = {}
    for name, choices in {"none": [{HEAD}, {HEAD}], "one": [{HEAD}, {LOOKUP}]}.items():
        engine = speculating(cyclic, LONG, (SpeculationMode.SELF_SPECULATE,))
        chooser, plans, plan = engine.speculation.chooser, [], engine.speculation.plan
        chooser.lookup.draft, chooser.lookup.min_match = lambda *_: {}, 2
        engine.speculation.plan = lambda *a, plan=plan, plans=plans, **o: plans.append(plan(*a, **o)) or plans[-1]
        requests = sessions([frozenset(allowed) for allowed in choices], [START], max_tokens=100)
        found = run(engine, [replace(request, sampling=SamplingParams(0.0)) for request in requests])
        assert found.new == {i: cycle_text(START, 100) for i in range(2)}
        assert any(isinstance(one, MultiStep) for one in plans)
        lengths[name] = found.steps
    assert lengths["none"] < 10 < lengths["one"]


def test_a_fused_loop_ignores_matches_of_a_session_without_lookups(cyclic):
    for allowed, stops in (({QUANTIZED}, False), ({QUANTIZED, LOOKUP}, True)):
        engine = speculating(cyclic, LONG)
        engine.speculation.chooser.lookup.draft = lambda *_: {}
        engine.speculation.chooser.lookup.min_match = 2
        engine.open(sessions([frozenset(allowed)])[0])
        engine.step()
        plan = engine.plan()
        assert isinstance(plan, LoopStep)
        assert bool(plan.loop.texts.match) is stops


def test_proposals_for_a_session_without_the_draft_service_are_dropped(cyclic):
    engine = wanting_drafts(cyclic)
    engine.open(sessions([frozenset({HEAD})])[0])
    engine.receive([chain(0, REPEATING, [5, 6])], ())
    assert not engine.sessions.by_id[0].tree
    assert not engine.speculation.service.stats.started


# --- the modes of sessions that restrict their sources ---


def policy(**present):
    """A policy whose drafter has answered, in a step with some sessions."""
    made = ModePolicy((SpeculationMode.SELF_SPECULATE, *DRAFT_MODES), lambda: 0.0)
    made.received(1, fresh=True)
    made.begin(1, **present)
    return made


def test_sessions_without_the_draft_service_wait_for_none():
    made = policy(served=False)
    for _ in range(200):
        made.begin(1, served=False)
        assert made.mode is SpeculationMode.SELF_SPECULATE
        assert made.without_drafts
        made.end([], 1, 1)
    assert made.selector is None or not made.selector.trials


def test_sessions_with_the_draft_service_alone_begin_with_it_and_are_measured_apart():
    made = policy()
    assert made.mode is SpeculationMode.SELF_SPECULATE
    usual = made.selector
    made.begin(1, apart=True)
    assert made.mode in DRAFT_MODES
    assert not made.drafting_paused
    assert made.selector is not usual
    made.begin(1)
    assert made.selector is usual


def test_many_sessions_with_the_draft_service_alone_begin_without():
    """Their first trial costs as much as that of others."""
    made = policy()
    made.begin(4, apart=True)
    assert made.mode not in DRAFT_MODES
    assert made.drafting_paused
