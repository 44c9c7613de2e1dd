"""Prompt lookup: it finds the longest match, leaves texts unchanged, and is used only where it pays."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu import library
from services.target.process.warmup import warm_up
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.sources.base import Demand
from services.target.speculation.sources.prompt_lookup import MIN_MATCH, PromptLookup, find
from tests.support.target.driving import CACHES, GREEDY, engine_of, load_model, opening, run, run_as_plain
from tests.support.target.self_speculation import LONG, self_speculating
from tests.support.tiny import write_model

WORDS = 12

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs compiled programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with so few tokens that texts repeat."""
    return write_model(tmp_path_factory.mktemp("model"), seed=1, vocab=WORDS)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, self_speculation="lookup")


def looking_up(model, **flags):
    """An engine that drafts with its own sources, at little cost of verified tokens."""
    engine = self_speculating(model, **flags)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1.2e-3})
    return engine


def sessions(count, temperature=0.0):
    """Prompts that repeat a phrase; short ones are cut off before it repeats."""
    rng = np.random.default_rng(3)
    for i in range(1, count + 1):
        phrase = rng.integers(3, WORDS, int(rng.integers(2, 9))).tolist()
        prompt = (phrase * 6)[: int(rng.integers(1, 40))]
        params = SamplingParams(temperature, seed=i, top_k=[0, 5][i % 2])
        ids = tuple(rng.integers(3, WORDS, 3).tolist())
        yield opening(i, prompt, params, max_tokens=int(rng.integers(1, 90)), stop_token_ids=ids)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 9))
def test_find_returns_the_longest_match(numbers, most):
    tokens = np.array(numbers, np.uint32)
    match, after = find(tokens, most)
    best, places = 0, []
    for place in range(1, len(numbers)):
        length = 0
        while length < place and numbers[place - 1 - length] == numbers[-1 - length]:
            length += 1
        length = min(length, 12)
        if length >= MIN_MATCH:
            places.append((length, place))
    places = places[-8:]  # the latest ones
    best, place = max(places, default=(0, 0))
    if not best or not most:
        assert match == 0
        assert not len(after)
        return
    assert match == best
    assert after.tolist() == numbers[place : place + most]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", CACHES)
def test_texts_and_finish_reasons_equal_plain_decoding(model, temperature, flags):
    one = opening(1, [5, 6, 7], SamplingParams(temperature, seed=9), max_tokens=300)
    for requests in (list(sessions(9, temperature)), [one]):
        run_as_plain(looking_up, model, requests, **flags)


def test_a_copy_drafts_for_sessions_without_a_match(folder):
    model = load_model(folder, self_speculation="quantized", self_speculation_format="int4")
    requests = list(sessions(9))
    expected = run(engine_of(model), requests)
    engine = looking_up(model)
    demands = []
    source = engine.speculation.chooser.source
    draft, source.draft = source.draft, lambda demand, *args: demands.append(demand) or draft(demand, *args)
    engine.speculation.chooser.always = True
    found = run(engine, requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert demands
    assert engine.speculation.chooser.lookup.estimate.tried > 0
    assert source.estimate.tried > 0


def test_multi_step_decoding_ends_at_a_match(model):
    """The engine comes back at a match, so that the next step verifies a lookup."""
    expected = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=300)]).new[1]
    engine = looking_up(model, coalesce_seconds=LONG)
    engine.open(opening(1, [5, 6, 7], max_tokens=300))
    new, ended = [], 0
    while not engine.idle:
        for commit in engine.step().commits:
            before = len(new)
            new += commit.tokens.tolist()
            text = np.array([5, 6, 7, *new], np.uint32)
            if before and not commit.verified and len(new) < 300:
                steps = len(new) - before
                repeated = [find(text[: len(text) - i], 9)[0] > 0 for i in range(steps)]
                assert not any(repeated[1:]), "it ends at the first match"
                ended += repeated[0]
    assert new == expected
    assert ended > 0


def min_match(engine, sessions, kv_tokens):
    """The shortest match that pays in steps of some sessions."""
    lookup = engine.speculation.chooser.lookup
    lookup.judge(Demand((), sessions, sessions, kv_tokens))
    return lookup.min_match


def test_lookups_that_are_rejected_stop_and_are_retried_later(model):
    engine = looking_up(model)
    lookup = engine.speculation.chooser.lookup
    assert min_match(engine, 1, 100) == MIN_MATCH
    for match in range(MIN_MATCH, 13):
        for _ in range(200):
            lookup.observe_match(match, 8, 0, goes_on=True)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 8e-3})
    assert min_match(engine, 2, 100) == 0, "each step judges anew"
    judged = 0
    while not min_match(engine, 2, 100):
        judged += 1
        assert judged < 64 * 400
    assert judged > 64


def test_expensive_tokens_are_verified_for_likely_matches_only(model):
    engine = looking_up(model)
    assert min_match(engine, 1, 100) == MIN_MATCH
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 2: 1.7e-3, 64: 45e-3})
    least = min_match(engine, 2, 100)
    assert least == 0 or engine.speculation.chooser.lookup.rate(least) > 0.7


def test_acceptance_rates_are_learned_by_match_length():
    lookup = PromptLookup(None, {})
    for _ in range(300):
        lookup.observe_match(3, 4, 1, goes_on=True)
        lookup.observe_match(9, 4, 4, goes_on=True)
    assert lookup.rate(3) == pytest.approx(0.5, abs=0.05)
    assert lookup.rate(9) > 0.97
    assert lookup.rate(5) == PromptLookup(None, {}).rate(5)


def test_penalties_and_log_probabilities_stay_exact(model):
    penalised = SamplingParams(0.0, presence_penalty=1.5, repetition_penalty=1.3)
    phrase = [5, 6, 7, 8] * 5
    requests = [opening(1, phrase, penalised, max_tokens=60), opening(2, phrase, GREEDY, logprobs=2, max_tokens=60)]
    expected, found = run(engine_of(model), requests), run(looking_up(model), requests)
    assert found.new == expected.new
    assert found.verified > 0


def test_prompt_lookup_is_part_of_self_speculation(model):
    engine = TargetEngine(model, TargetConfig(max_total_tokens=4096, coalesce_seconds=0.0))
    warm_up(engine)
    assert engine.speculation.policy.mode is SpeculationMode.SELF_SPECULATE
    assert engine.speculation.chooser.source is None
    requests = [opening(1, [5, 6, 7], max_tokens=400)]
    assert run(engine, requests).new == run(engine_of(model), requests).new


def test_flags_of_prompt_lookup(folder, tmp_path):
    assert not load_model(folder).prompt_lookup, "not by default for small models"
    assert load_model(folder, self_speculation="lookup", quantization="int4").prompt_lookup
    with pytest.raises(ConfigError, match="--self-speculation lookup: --speculative-num-draft-tokens"):
        load_model(folder, self_speculation="lookup", speculative_num_draft_tokens=4)
    large = write_model(tmp_path, hidden_size=512, intermediate_size=4096)
    for flags, drafts in (({}, True), ({"quantization": "int4"}, False), ({"self_speculation": "lookup"}, False)):
        loaded = load_model(large, **flags)
        assert (loaded.prompt_lookup, loaded.drafts) == (True, drafts)
    assert not load_model(large, self_speculation="off").prompt_lookup
