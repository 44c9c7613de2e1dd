"""The quantized self-draft: texts equal plain decoding, and chains are as long as they pay."""

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
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices import weights
from services.target.process.warmup import warm_up
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.modes.mode import SpeculationMode
from services.target.speculation.sources.quantized_self_draft import QuantizedSelfDraft
from tests.support.target.driving import CACHES, GREEDY, chain, engine_of, load_model, opening, run, run_as_plain
from tests.support.target.self_speculation import drafting, pending_message
from tests.support.tiny import VOCAB, write_model, write_tokenizer

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs compiled programs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, self_speculation="quantized", self_speculation_format="int4")


def sessions(count, temperature=1.0, seed=0):
    """Sessions of different lengths; some end by a stop token, some by max_tokens."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 70)).tolist()
        params = SamplingParams(temperature, seed=i, top_p=[1.0, 0.9][i % 2], top_k=[0, 0, 40][i % 3])
        ids = tuple(rng.integers(3, VOCAB, 8).tolist())
        yield opening(i, prompt, params, max_tokens=int(rng.integers(1, 60)), stop_token_ids=ids)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", CACHES)
def test_texts_and_finish_reasons_equal_plain_decoding(model, temperature, flags):
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
def test_texts_equal_plain_decoding_in_other_number_formats(folder, flags):
    model = load_model(folder, **({"self_speculation": "quantized", "self_speculation_format": "int4"} | flags))
    requests = list(sessions(6))
    expected = run(engine_of(model), requests)
    found = run(drafting(model), requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert found.accepted > 0
    assert set(found.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "gemma3_text"])
def test_texts_equal_plain_decoding_in_other_families(tmp_path, family):
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


def test_texts_equal_plain_decoding_with_a_pruned_head(tmp_path):
    """The copy drafts with the pruned language model head."""
    folder = write_model(tmp_path, vocab=9000, initializer_range=0.2)
    model = load_model(folder, dtype="bfloat16", self_speculation="quantized", self_speculation_format="int4")
    requests = [opening(i, [5 + i], SamplingParams(i % 2, seed=i), max_tokens=40) for i in (1, 2, 3)]
    expected, found = run(engine_of(model), requests), run(drafting(model), requests)
    assert found.new == expected.new
    assert found.accepted > 0


def test_draft_tokens_are_those_of_an_int4_model(folder, model, monkeypatch):
    monkeypatch.setattr(weights, "STEPS", weights.STEPS[:1])  # the copy's
    narrow = load_model(folder, quantization="int4")
    engine = drafting(model)
    for token in range(5, 25):  # prompts of one token, so that the cache holds no keys of the wide weights
        expected = run(engine_of(narrow), [opening(1, [token], max_tokens=9)]).new[1]
        engine.open(opening(1, [token], max_tokens=9))
        plan = engine.plan()
        drafts = plan.works[0].draft.tokens.tolist()
        assert plan.source_of(1) is engine.speculation.chooser.source
        assert drafts == expected[: len(drafts)]
        assert drafts
        engine.abort()
        engine.flush()


def test_a_useless_copy_leaves_texts_unchanged_and_its_acceptance_falls(folder):
    model = load_model(folder, self_speculation="quantized", self_speculation_format="int4")
    program = model.runner.program
    rng = torch.Generator().manual_seed(0)
    for weight in program.kept:
        if isinstance(weight, weights.PackedWeight) and weight.format == weights.Format.INT4:
            noise = torch.randn(weight.outputs, weight.inputs, generator=rng)
            weight.fill(torch.arange(weight.outputs), noise)
    requests = list(sessions(5))
    engine = drafting(model)
    found = run(engine, requests)
    assert found.new == run(engine_of(model), requests).new
    assert engine.speculation.chooser.source.acceptance < 0.4
    assert found.accepted < 0.2 * found.verified


def test_penalties_log_probabilities_and_grammars_stay_exact(model):
    """Verification applies penalties, grammars and min_tokens, and returns log-probabilities."""
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
        tokens, logprobs, verified = {}, {}, dict.fromkeys(range(1, 8), 0)
        for request in requests:
            engine.open(request)
        while not engine.idle:
            output = engine.step()
            assert not output.failures
            for commit in output.commits:
                tokens[commit.session_id] = [*tokens.get(commit.session_id, ()), *commit.tokens.tolist()]
                verified[commit.session_id] += commit.verified
                if commit.logprobs is not None:
                    logprobs.setdefault(commit.session_id, []).extend(commit.logprobs.values.tolist())
            engine.check()
        return tokens, logprobs, verified

    tokens, logprobs, _ = texts(engine_of(model))
    found, found_logprobs, verified = texts(drafting(model))
    assert found == tokens
    assert logprobs.keys() == found_logprobs.keys() == {2}
    np.testing.assert_allclose(found_logprobs[2], logprobs[2], rtol=1e-5)
    assert verified[4] == verified[5] == 0
    assert min(verified[i] for i in (1, 2, 3)) > 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_chains_respect_speculative_num_steps(model, depth):
    found = run(drafting(model, speculative_num_steps=depth), [opening(1, [5, 6, 7], max_tokens=40)])
    assert max(commit.verified for commit in found.commits[1]) == depth
    assert found.new == run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=40)]).new


def test_preemption_leaves_texts_unchanged(model):
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in range(6)]
    expected = run(engine_of(model), requests).new
    engine = drafting(model, page_size=4, max_total_tokens=72)
    assert run(engine, requests).new == expected
    assert engine.scheduler.preemptions > 0


def test_cached_keys_are_those_of_the_model(model):
    """Verification overwrites the copy's keys, so that later sessions find those of the model."""
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
    assert len(rows[0]) < len(rows[1]) + 16, "others belong to draft tokens rejected in the last steps"
    reader = opening(2, prompt, max_tokens=60, committed=expected[:38])
    engine.open(reader)
    new = []
    while not engine.idle:
        new += [token for commit in engine.step().commits for token in commit.tokens.tolist()]
    assert new == expected[38:]


def test_drafting_ends_on_a_message(model):
    engine = drafting(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1.0, 64: 1.0})
    engine.open(opening(1, [5, 6, 7], max_tokens=200))
    while not engine.step().commits:
        pass
    engine.speculation.chooser.source.cost = engine.speculation.planner.budget.cost.scaled(0.01)
    assert len(engine.plan().works[0].draft) > 4

    with pending_message(engine):
        assert len(engine.plan().works[0].draft) == 1


@pytest.mark.parametrize(("share", "token_cost", "acceptance", "least", "most"), [
    (0.3, 1.0, 0.97, 6, 15),  # cheap and accurate
    (0.3, 1.0, 0.5, 1, 3),
    (1.5, 8.0, 0.9, 1, 1),  # more expensive than plain steps, as are further tokens
])  # fmt: skip
def test_chain_length_follows_acceptance_and_costs(model, share, token_cost, acceptance, least, most):
    engine = drafting(model)
    engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: token_cost * 64e-3 if token_cost > 1 else 1.1e-3})
    source = engine.speculation.chooser.source
    source.cost = engine.speculation.planner.budget.cost.scaled(share)
    for _ in range(200):
        source.estimate.observe(10, 10 * acceptance)
    assert least <= source.chain_length(1, 0, 16) <= most
    assert source.chain_length(1, 0, 2) <= 2, "no longer than the room"
    beside = source.chain_length(1, 0, 16, others=500)
    assert least <= beside <= most if token_cost == 1.0 else beside == 0, "prompts do not count"


def test_deferred_hidden_states_equal_plain_decoding(model, monkeypatch):
    """While drafting is paused, hidden states of committed tokens are kept for a head of the draft service."""
    monkeypatch.setattr(features, "_MAX_DEFERRED_ROWS", 9)  # at the end of a session, deferred states are dropped

    def states(engine):
        spec = FeatureSpec((0, 1), final=True)
        engine.features.configure(7, spec, b"")
        for i in (1, 2, 3):
            engine.open(replace(opening(i, list(range(4, 20 + i)), max_tokens=50), feature_spec=7))
        engine.speculation.policy.received(1, fresh=True)  # a drafter has answered
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
    (expected, none), (found, verified) = states(plain), states(drafting(model))
    assert none == 0 < verified
    both = expected.keys() & found.keys()
    assert len(both) > 150
    assert all(found[key] == expected[key] for key in both)


def test_the_copy_follows_weight_updates(tmp_path, monkeypatch):
    first, second = (write_model(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    model = load_model(first, self_speculation="quantized", self_speculation_format="int4")
    engine = drafting(model)
    model.runner.update(load_file(second / "model.safetensors"))
    requests = [opening(i, [5 + i, 6], max_tokens=50) for i in range(8)]
    other = drafting(load_model(second, self_speculation="quantized", self_speculation_format="int4"))
    monkeypatch.setattr(QuantizedSelfDraft, "chain_length", lambda *_: 4)  # independent of measured costs
    found, fresh = run(engine, requests), run(other, requests)
    assert found.new == fresh.new
    assert (found.verified, found.accepted) == (fresh.verified, fresh.accepted)


def test_a_good_drafter_replaces_self_speculation(model):
    """A drafter is tried beside self-speculation, and chosen if it is much better."""
    engine = TargetEngine(model, TargetConfig(max_total_tokens=4096, coalesce_seconds=0.0))
    warm_up(engine)
    truth = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=400)]).new[1]
    modes = set()
    whole = [5, 6, 7, *truth]

    def proposals(session_id, tokens):
        modes.add(engine.speculation.policy.mode)
        return (
            [chain(session_id, tokens, whole[len(tokens) : len(tokens) + 8], -0.01)]
            if not engine.speculation.policy.drafting_paused
            else []
        )

    for _ in range(4):
        assert run(engine, [opening(1, [5, 6, 7], max_tokens=400)], proposals).new[1] == truth
    assert SpeculationMode.SELF_SPECULATE in modes
    assert modes & {SpeculationMode.WAIT_FOR_DRAFT, SpeculationMode.DRAFT_IF_READY}


def test_the_warm_up_measures_the_copy(model):
    engine = TargetEngine(model, TargetConfig(max_total_tokens=4096))
    warm_up(engine)
    assert engine.speculation.chooser.source.cost.observed, "the cost of the copy is measured"
    assert engine.speculation.chooser.source.acceptance == pytest.approx(0.8), "acceptance in warm-up texts is dropped"
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
def test_conflicting_flags_are_refused(folder, flags, why):
    with pytest.raises(ConfigError, match=why) as error:
        load_model(folder, self_speculation="quantized", self_speculation_format="int4", **flags)
    assert "--self-speculation" in str(error.value)
    assert not load_model(folder, self_speculation="off").drafts


def test_a_copy_must_be_narrower_than_the_weights(folder):
    with pytest.raises(
        ConfigError, match="--self-speculation quantized: with --quantization int8 the weights are as narrow"
    ):
        load_model(folder, self_speculation="quantized", self_speculation_format="int8", quantization="int8")
    eight, four = (
        load_model(folder, self_speculation="quantized", self_speculation_format=name).runner.draft_bytes
        for name in ("int8", "int4")
    )
    assert four < eight < load_model(folder).runner.weight_bytes


def test_small_models_have_no_copy_by_default(folder, tmp_path):
    assert not load_model(folder).drafts
    large = write_model(tmp_path, hidden_size=512, intermediate_size=4096)
    assert load_model(large).drafts
    assert not load_model(large, quantization="int8").drafts
    assert not load_model(large, speculative_num_draft_tokens=4).drafts
