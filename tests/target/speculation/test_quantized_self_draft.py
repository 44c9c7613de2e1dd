"""Drafts of the target's own change no text, whatever they are worth, and are as long as they pay."""

import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.features import features
from services.target.kernels.cpu import library, weights
from services.target.process.warmup import warm_up
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.mode_selector import SpeculationMode
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from tests.support.target.driving import CACHES, GREEDY, chain, engine_of, load_model, opening, run, run_as_plain
from tests.support.tiny import VOCAB, write_model, write_tokenizer

pytestmark = pytest.mark.skipif(not library.available(), reason="drafts of its own are of compiled programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, self_speculation="quantized", self_speculation_format="int4")


def drafting(model, **flags):
    """An engine that drafts by itself in every step."""
    small = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": 0.0}
    engine = TargetEngine(model, TargetConfig(**(small | flags)), (SpeculationMode.SELF_SPECULATE,))
    engine.speculation.chooser.always = True
    engine.speculation.chooser.looks_up = False  # tests/target/speculation/test_prompt_lookup.py has what texts repeat
    return engine


def sessions(count, temperature=1.0, seed=0):
    """Sessions of unlike lengths, some of which end by a stop token, some by their limit."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 70)).tolist()
        params = SamplingParams(temperature, seed=i, top_p=[1.0, 0.9][i % 2], top_k=[0, 0, 40][i % 3])
        ids = tuple(rng.integers(3, VOCAB, 8).tolist())
        yield opening(i, prompt, params, max_tokens=int(rng.integers(1, 60)), stop_token_ids=ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", CACHES)
def test_texts_and_ends_are_those_of_plain_steps(model, temperature, flags):
    one = opening(1, [5, 6, 7], SamplingParams(temperature, seed=9), max_tokens=50)
    for requests in (list(sessions(9, temperature)), [one]):
        run_as_plain(drafting, model, requests, **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16", "self_speculation": "quantized", "self_speculation_format": "int8"},
    ],
)
def test_in_other_formats_too(folder, flags):
    model = load_model(folder, **({"self_speculation": "quantized", "self_speculation_format": "int4"} | flags))
    requests = list(sessions(6))
    expected = run(engine_of(model), requests)
    found = run(drafting(model), requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert found.accepted > 0
    assert set(found.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_other_families_too(tmp_path, family):
    """Biases, norms of queries and keys, norms of branches, windows and soft caps."""
    options = {"sliding_window": 16} if family.startswith("gemma") else {}
    model = load_model(
        write_model(tmp_path, family, **options), self_speculation="quantized", self_speculation_format="int4"
    )
    assert model.drafts
    requests = list(sessions(5))
    expected, found = run(engine_of(model), requests), run(drafting(model), requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert found.accepted > 0


def test_behind_a_screened_head(tmp_path):
    """The screen's copy of the head is what drafts read."""
    folder = write_model(tmp_path, vocab=9000, initializer_range=0.2)
    model = load_model(folder, dtype="bfloat16", self_speculation="quantized", self_speculation_format="int4")
    requests = [opening(i, [5 + i], SamplingParams(i % 2, seed=i), max_tokens=40) for i in (1, 2, 3)]
    expected, found = run(engine_of(model), requests), run(drafting(model), requests)
    assert found.new == expected.new
    assert found.accepted > 0


def test_a_chain_is_what_weights_of_four_bits_say(folder, model, monkeypatch):
    monkeypatch.setattr(weights, "_STEPS", weights._STEPS[:1])  # the copy's
    narrow = load_model(folder, quantization="int4")
    engine = drafting(model)
    for token in range(5, 25):  # of a single token, so that the cache holds nothing of the wide weights
        said = run(engine_of(narrow), [opening(1, [token], max_tokens=9)]).new[1]
        engine.open(opening(1, [token], max_tokens=9))
        plan = engine._plan()
        drafts = plan.works[0].draft.tokens.tolist()
        assert not plan.from_service
        assert drafts == said[: len(drafts)]
        assert drafts
        engine.abort()
        engine.flush()


def test_a_useless_copy_changes_nothing_and_is_given_up(folder):
    model = load_model(folder, self_speculation="quantized", self_speculation_format="int4")
    program = model.runner._program
    rng = torch.Generator().manual_seed(0)
    for weight in program._kept:
        if isinstance(weight, weights.PackedWeight) and weight.format == weights.Format.INT4:
            noise = torch.randn(weight.outputs, weight.inputs, generator=rng)
            weight.fill(torch.arange(weight.outputs), noise)
    requests = list(sessions(5))
    engine = drafting(model)
    found = run(engine, requests)
    assert found.new == run(engine_of(model), requests).new
    assert engine.speculation.chooser.source.acceptance < 0.4
    assert found.accepted < 0.2 * found.verified


def test_what_sessions_ask_for_besides_stays_exact(model):
    """Penalties, log-probabilities, least lengths and grammars are the verification's business."""
    penalised = SamplingParams(1.0, seed=4, presence_penalty=1.0, repetition_penalty=1.2)
    requests = [
        opening(1, [5, 6, 7], penalised, max_tokens=40),
        opening(2, [5, 6, 7, 8], SamplingParams(1.0, seed=5), logprobs=2, max_tokens=40),
        opening(3, [5, 6], GREEDY, min_tokens=9, stop_token_ids=tuple(range(3, 60))),
        opening(4, [9, 9, 9], GREEDY, grammar=Grammar(GrammarKind.REGEX, "[a-f]{1,30}"), ignore_eos=False),
        replace(opening(5, [7, 7], SamplingParams(1.0, seed=6)), max_draft_tokens=0),
        *list(sessions(7))[5:],
    ]

    def texts(engine):
        tokens, told, verified = {}, {}, dict.fromkeys(range(1, 8), 0)
        for request in requests:
            engine.open(request)
        while not engine.idle:
            output = engine.step()
            assert not output.failures
            for commit in output.commits:
                tokens[commit.session_id] = [*tokens.get(commit.session_id, ()), *commit.tokens.tolist()]
                verified[commit.session_id] += commit.verified
                if commit.logprobs is not None:
                    told.setdefault(commit.session_id, []).extend(commit.logprobs.values.tolist())
            engine.check()
        return tokens, told, verified

    tokens, told, _ = texts(engine_of(model))
    found, found_told, verified = texts(drafting(model))
    assert found == tokens
    assert told.keys() == found_told.keys() == {2}
    np.testing.assert_allclose(found_told[2], told[2], rtol=1e-5)
    assert verified[4] == verified[5] == 0
    assert min(verified[i] for i in (1, 2, 3)) > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_more_is_drafted_in_a_row_than_the_flag_says(model, depth):
    found = run(drafting(model, speculative_num_steps=depth), [opening(1, [5, 6, 7], max_tokens=40)])
    assert max(commit.verified for commit in found.commits[1]) == depth
    assert found.new == run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=40)]).new


def test_no_page_is_taken_from_others_and_all_come_home(model):
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in range(6)]
    expected = run(engine_of(model), requests).new
    engine = drafting(model, page_size=4, max_total_tokens=72)
    assert run(engine, requests).new == expected
    assert engine.scheduler.preemptions > 0


def test_what_is_cached_is_the_model_s_own(model):
    """Rows of the copy lie where verification wrote next: who comes later finds nothing of them."""
    prompt = list(range(5, 40))
    expected = run(engine_of(model, page_size=4), [opening(1, prompt, max_tokens=60)]).new[1]
    engine, plain = drafting(model, page_size=4), engine_of(model, page_size=4)
    rows = []
    for one in (engine, plain):
        keys = one.cache.keys[1].zero_()
        assert run(one, [opening(1, prompt, max_tokens=40)]).new[1] == expected[:40]
        rows.append({tuple(row.flatten().tolist()) for row in keys[1:].flatten(0, 1) if row.any()})
    assert len(rows[1]) > 70
    assert rows[1] <= rows[0], "to the last bit"
    assert len(rows[0]) < len(rows[1]) + 16, "what else there is was refused in the last steps"
    reader = opening(2, prompt, max_tokens=60, committed=expected[:38])
    engine.open(reader)
    said = []
    while not engine.idle:
        said += [token for commit in engine.step().commits for token in commit.tokens.tolist()]
    assert said == expected[38:]


def test_a_draft_is_left_when_somebody_calls(model):
    engine = drafting(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    engine.open(opening(1, [5, 6, 7], max_tokens=200))
    while not engine.step().commits:
        pass
    engine.speculation.chooser.source._cost = engine.speculation.planner.budget.cost.scaled(0.01)
    assert len(engine._plan().works[0].draft) > 4

    @contextmanager
    def called():
        reader, writer = os.pipe()
        os.write(writer, b"x")
        yield [reader]
        os.close(reader)
        os.close(writer)

    engine.message_files = called
    assert len(engine._plan().works[0].draft) == 1


@pytest.mark.parametrize(("share", "rows", "right", "least", "most"), [
    (0.3, 1.0, 0.97, 6, 15),  # cheap and right
    (0.3, 1.0, 0.5, 1, 3),
    (1.5, 8.0, 0.9, 1, 1),  # dearer than plain steps, and so are rows
])  # fmt: skip
def test_chains_are_as_long_as_they_pay(model, share, rows, right, least, most):
    engine = drafting(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: rows * 64e-3 if rows > 1 else 1.1e-3})
    draft = engine.speculation.chooser.source
    draft._cost = engine.speculation.planner.budget.cost.scaled(share)
    for _ in range(200):
        draft._estimate.observe(10, 10 * right)
    assert least <= draft._length(1, 0, 16) <= most
    assert draft._length(1, 0, 2) <= 2, "no longer than there is room for"
    beside = draft._length(1, 0, 16, others=500)
    assert least <= beside <= most if rows == 1.0 else beside == 0, "what a prompt takes is no part of a chain's price"


def test_states_that_wait_are_those_of_plain_steps(model, monkeypatch):
    """A head is told that no hints are wanted; what it may need later is kept all the same, of committed rows alone."""

    monkeypatch.setattr(features, "_MAX_DEFERRED_ROWS", 9)  # what waits at a session's end nobody needs

    def states(engine):
        spec = FeatureSpec((0, 1), final=True)
        engine.features.configure(7, spec, b"")
        for i in (1, 2, 3):
            engine.open(replace(opening(i, list(range(4, 20 + i)), max_tokens=50), feature_spec=7))
        engine.speculation.policy.received(1, fresh=True)  # a drafter is there
        rows, verified = {}, 0
        while not engine.idle:
            output = engine.step()
            verified += sum(commit.verified for commit in output.commits)
            for block in output.features:
                for i, row in enumerate(block.rows):
                    assert (block.session_id, block.first + i) not in rows
                    rows[block.session_id, block.first + i] = row.tobytes()
        return rows, verified

    plain = TargetEngine(model, TargetConfig(max_total_tokens=4096, coalesce_seconds=0.0), (SpeculationMode.NONE,))
    (expected, none), (found, some) = states(plain), states(drafting(model))
    assert none == 0 < some
    both = expected.keys() & found.keys()
    assert len(both) > 150
    assert all(found[key] == expected[key] for key in both)


def test_new_weights_are_drafted_with(tmp_path, monkeypatch):
    first, second = (write_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    model = load_model(first, self_speculation="quantized", self_speculation_format="int4")
    engine = drafting(model)
    model.runner.update(load_file(second / "model.safetensors"))
    requests = [opening(i, [5 + i, 6], max_tokens=50) for i in range(8)]
    other = drafting(load_model(second, self_speculation="quantized", self_speculation_format="int4"))
    monkeypatch.setattr(QuantizedSelfDraft, "_length", lambda *_: 4)  # whatever steps take
    found, fresh = run(engine, requests), run(other, requests)
    assert found.new == fresh.new
    assert (found.verified, found.accepted) == (fresh.verified, fresh.accepted)


def test_hints_are_tried_beside_it(model):
    """A drafter that comes is asked, and one that is much better is what serves."""
    engine = TargetEngine(model, TargetConfig(max_total_tokens=4096, coalesce_seconds=0.0))
    warm_up(engine)
    truth = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=400)]).new[1]
    ways = set()
    whole = [5, 6, 7, *truth]

    def hints(session_id, tokens):
        ways.add(engine.speculation.policy.mode)
        return (
            [chain(session_id, tokens, whole[len(tokens) : len(tokens) + 8], -0.01)]
            if not engine.speculation.drafting_paused
            else []
        )

    for _ in range(4):
        assert run(engine, [opening(1, [5, 6, 7], max_tokens=400)], hints).new[1] == truth
    assert SpeculationMode.SELF_SPECULATE in ways
    assert ways & {SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY}


def test_the_warm_up_times_the_model_s_own_steps(model):
    engine = TargetEngine(model, TargetConfig(max_total_tokens=4096))
    warm_up(engine)
    assert engine.speculation.chooser.source.cost._observed, "what the copy takes is known"
    assert engine.speculation.chooser.source.acceptance == pytest.approx(0.8), "what its own text was like is forgotten"
    assert engine.speculation.policy.mode is SpeculationMode.SELF_SPECULATE


# --- flags ---


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"quantization": "int4"}, "as narrow"),
        ({"attention_backend": "torch_native"}, "--attention-backend"),
        ({"speculative_num_draft_tokens": 4}, "--speculative-num-draft-tokens"),
        ({"speculative_always": True}, "--speculative-always"),
        ({"tp_size": 1, "enable_torch_compile": True}, "--enable-torch-compile"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, flags, why):
    with pytest.raises(ConfigError, match=why) as error:
        load_model(folder, self_speculation="quantized", self_speculation_format="int4", **flags)
    assert "--self-speculation" in str(error.value)
    assert not load_model(folder, self_speculation="off").drafts


def test_a_copy_is_narrower_than_the_weights(folder):
    with pytest.raises(
        ConfigError, match="--self-speculation quantized: with --quantization int8 the weights are as narrow"
    ):
        load_model(folder, self_speculation="quantized", self_speculation_format="int8", quantization="int8")
    eight, four = (
        load_model(folder, self_speculation="quantized", self_speculation_format=name).runner.draft_bytes
        for name in ("int8", "int4")
    )
    assert four < eight < load_model(folder).runner.weight_bytes


def test_small_models_are_left_alone(folder, tmp_path):
    assert not load_model(folder).drafts
    large = write_model(tmp_path, hidden_size=512, intermediate_size=4096)
    assert load_model(large).drafts
    assert not load_model(large, quantization="int8").drafts
    assert not load_model(large, speculative_num_draft_tokens=4).drafts
