"""Prepared steps: texts equal those of steps in turn. The device prepares on CUDA; these tests let the CPU do it."""

import numpy as np
import pytest
import torch

from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.engine.launching import launcher as launcher_module
from services.target.process.warmup import warm_up
from services.target.sampling import sampler
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost
from tests.support.target.driving import chain, engine_of, load_model, opening, preparing_engine, run, spoiled_roots
from tests.support.target.proposals import Drafts
from tests.support.tiny import VOCAB, write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def sessions(count, temperature, seed=0, most=40):
    """Sessions of different lengths; some end by a stop token, some by max_tokens."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        params = SamplingParams(temperature, seed=i, top_p=[1.0, 0.9][i % 2], top_k=[0, 0, 40][i % 3])
        ids = tuple(rng.integers(3, VOCAB, 8).tolist())
        prompt = rng.integers(3, VOCAB, rng.integers(1, 70)).tolist()
        yield opening(i, prompt, params, max_tokens=int(rng.integers(1, most)), stop_token_ids=ids)


TIGHT = {"page_size": 4, "max_total_tokens": 200, "max_running_requests": 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["right", "wrong", "mixed", "late"])
@pytest.mark.parametrize("flags", [{"page_size": 1, "chunked_prefill_size": 9}, TIGHT, {"disable_radix_cache": True}])
def test_texts_and_finish_reasons_equal_steps_in_turn(model, temperature, kind, flags):
    requests = list(sessions(7, temperature))
    expected = run(engine_of(model), requests)
    engine = preparing_engine(model, **flags)
    found = run(engine, requests, Drafts(kind, requests, expected.new))
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert set(found.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert engine.prepared > found.steps / 4
    assert (found.accepted > 20) == (kind != "wrong")


def test_draft_tokens_that_are_there_are_verified_without_a_step_between(model):
    """A right chain that reaches far enough is accepted step after step, as if the host were not there."""
    request = opening(1, [5, 6, 7], max_tokens=60, ignore_eos=True)
    expected = run(engine_of(model), [request])
    engine = preparing_engine(model, max_total_tokens=4096)
    engine.speculation.planner.max_tokens = 5
    drafts = Drafts("right", [request], expected.new)
    found = run(engine, [request], lambda i, path: drafts.right(i, path, 30))
    assert found.new == expected.new
    assert found.steps <= 60 / 5 + 4
    assert engine.prepared >= found.steps - 4
    lengths = [len(commit.tokens) for commit in found.commits[1]]
    assert lengths[2:-2] == [5] * len(lengths[2:-2])


def test_a_bonus_token_beside_the_verified_ones_survives(model):
    """The likeliest children are wrong; the right one is not verified, but what hangs below it is, one step later."""
    request = opening(1, [5, 6, 7], max_tokens=40)
    expected = run(engine_of(model), [request])
    text = [5, 6, 7, *expected.new[1]]
    engine = preparing_engine(model)
    engine.speculation.planner.max_tokens = 3

    def proposals(i, path):
        ahead = text[len(path) : len(path) + 6]
        if not ahead:
            return []
        wrong = [token for token in (10, 11, 12) if token != ahead[0]][:2]
        return [chain(i, path, [token], -0.1) for token in wrong] + [chain(i, path, ahead, -1.0)]

    found = run(engine, [request], proposals)
    assert found.new == expected.new
    assert engine.prepared > 10
    assert found.accepted > 10


def test_pages_that_are_short_end_preparation_but_no_session(model):
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in range(6)]
    expected = run(engine_of(model), requests)
    engine = preparing_engine(model, page_size=4, max_total_tokens=72)
    found = run(engine, requests, Drafts("right", requests, expected.new))
    assert found.new == expected.new
    assert engine.scheduler.preemptions > 0
    assert engine.prepared > 2


def test_draft_tokens_that_do_not_pay_get_no_room(model):
    requests = list(sessions(4, 0.0))
    expected = run(engine_of(model), requests)
    engine = preparing_engine(model)
    engine.speculation.planner.budget = Budget(StepCost({rows: 10.0**rows for rows in range(1, 10)}))
    found = run(engine, requests, Drafts("right", requests, expected.new))
    assert found.new == expected.new
    assert found.verified < found.steps


def test_sessions_that_need_the_host_between_go_step_by_step(model):
    """Penalties, grammars, log-probabilities and min_tokens among other sessions."""
    grammar = Grammar(GrammarKind.REGEX, "([a-d]{2,5}-)*[xyz]{1,3}!")
    options = [
        {}, {"params": SamplingParams(1.0, seed=2, frequency_penalty=0.7)}, {"grammar": grammar}, {"logprobs": 2},
        {"min_tokens": 24, "stop_token_ids": (9, 10)},
    ]  # fmt: skip
    requests = [opening(i, [7 + i] * 9, **({"params": SamplingParams(1.0, seed=i)} | w)) for i, w in enumerate(options)]
    engines = engine_of(model), preparing_engine(model)
    for engine in engines:
        engine.sessions.grammars.request(99, grammar)
        engine.sessions.grammars.wait(10)
        engine.sessions.grammars.forget(99)
    expected = run(engines[0], requests)
    drafts = Drafts("mixed", requests, expected.new)
    assert run(engines[1], requests, drafts).new == expected.new
    assert engines[1].prepared == 0
    only = requests[4:]
    assert run(engines[1], only, drafts).new[4] == expected.new[4]
    assert engines[1].prepared == 0


@pytest.mark.parametrize("kind", ["right", "mixed"])
def test_tokens_that_are_sampled_again_invalidate_what_was_prepared(model, kind, monkeypatch):
    """Asynchronous sampling may find, after the device has walked on, that it needs more of the vocabulary."""
    monkeypatch.setattr(sampler, "_ORDERED", 8)
    requests = [opening(i, [5 + i] * 4, SamplingParams(1.0, seed=i, top_p=0.5), max_tokens=24) for i in range(5)]
    expected = run(engine_of(model), requests)
    engine = preparing_engine(model)
    spoiled = spoiled_roots(monkeypatch)
    found = run(engine, requests, Drafts(kind, requests, expected.new))
    assert found.new == expected.new
    assert sum(spoiled) > 5
    assert engine.prepared > 5
    assert found.accepted > 5


def test_broken_logits_end_one_session_while_the_prepared_step_runs(tmp_path):
    model = load_model(write_model(tmp_path, tie_word_embeddings=False))
    table = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(0))
    table[300] = float("nan")
    model.runner.update({"model.embed_tokens.weight": table})
    healthy = opening(1, [5, 6, 7], max_tokens=16)
    expected = run(engine_of(model), [healthy]).new
    engine = preparing_engine(model, page_size=1)
    drafts = Drafts("right", [healthy], expected)
    engine.open(healthy)
    engine.open(opening(2, [5, 9, 7]))
    tokens, failures = {1: [5, 6, 7], 2: [5, 9, 7]}, []
    while not engine.idle:
        engine.receive(drafts(1, tokens[1]), ())
        engine.receive([chain(2, tokens[2], [300, 8])], ())
        engine.receive([chain(2, tokens[2], [token], -0.5) for token in range(20, 40)], ())
        output = engine.step()
        for commit in output.commits:
            tokens[commit.session_id] += commit.tokens.tolist()
        failures += [failure.session_id for failure in output.failures]
        engine.check()
        if len(tokens[2]) > 8:  # the session's own text meets the broken token
            engine.close(2)
    assert tokens[1][3:] == expected[1]
    assert engine.prepared > 2


@pytest.mark.parametrize("fails", [False, True])
def test_the_warm_up_tries_prepared_steps(model, fails, monkeypatch, caplog):
    """Where the device cannot prepare them, steps with draft tokens go one by one."""
    engine = preparing_engine(model)
    if fails:
        monkeypatch.setattr(launcher_module, "prepare", lambda *_, **__: {}["no such kernel"])
    warm_up(engine)
    assert (engine.prepared, engine.launcher.prepares) == ((0, False) if fails else (engine.prepared, True))
    assert fails or engine.prepared > 2
    assert ("do not overlap: 'no such kernel'" in caplog.text) == fails
    assert engine.overlap
    requests = list(sessions(3, 1.0))
    expected = run(engine_of(model), requests)
    found = run(engine, requests, Drafts("right", requests, expected.new))
    assert found.new == expected.new


def test_flags_that_shape_trees_and_the_overlap_flag_switch_it_off(model):
    assert not engine_of(model, disable_overlap_schedule=True).launcher.prepares
    requests = list(sessions(3, 0.0))
    expected = run(engine_of(model), requests)
    engine = preparing_engine(model, speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)
    assert run(engine, requests, Drafts("right", requests, expected.new)).new == expected.new
    assert engine.prepared == 0
