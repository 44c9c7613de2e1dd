"""The local EAGLE head: its draft tokens equal those of a NumPy twin, and texts equal plain decoding."""

from array import array
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format
from services.target.model.loading.self_speculation import SelfSpeculationPlan, plan_self_speculation
from services.target.speculation.estimates import average
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.linear_cost import LinearCost
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.sources import base, head_estimates
from tests.support.checkpoints.heads import write_head, write_pair
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.twins.heads import Twin
from tests.support.target.driving import CACHES, engine_of, load_model, opening, run, run_as_plain
from tests.support.target.self_speculation import LAYERS, LONG, check_draft_tokens, drafting, with_head
from tests.support.tiny import VOCAB

pytestmark = pytest.mark.skipif(not library.available(), reason="heads are of compiled programs")


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [
    {}, {"norm_before_residual": True}, {"rope_theta": 500.0}, {"first": "layers.0."},
    {"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
])  # fmt: skip
def test_draft_tokens_and_probabilities_equal_the_twin(tmp_path, options):
    target, folder, made = write_pair(tmp_path, "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS, **options)
    twin, model = Twin.of("EAGLE3", *made, target), with_head(target, folder)
    for page_size in (1, 16):
        engine = drafting(model, page_size=page_size)
        rng = np.random.default_rng(0)
        for i, length in enumerate((1, 2, 3, 16, 17, 40), 1):
            params = SamplingParams(i % 2, seed=i, top_k=[0, 30][i // 4])
            engine.open(opening(i, rng.integers(3, VOCAB, length).tolist(), params, max_tokens=40))
        engine.step()
        assert sum(check_draft_tokens(twin, engine)[1] for _ in range(6) if engine.step()) >= 36


@pytest.mark.usefixtures("exact")
def test_cached_pages_of_other_sessions_are_used(pair):
    target, folder, made = pair
    twin, model = Twin.of("EAGLE3", *made, target), with_head(target, folder)
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, VOCAB, 70).tolist()
    engine = drafting(model)
    kv = engine.speculation.chooser.source.kv

    def first_drafts(session_id, tokens):
        engine.open(opening(session_id, tokens, max_tokens=9))
        engine.step()
        works, _ = check_draft_tokens(twin, engine)
        assert session_id in [work.chunk.session.id for work in works if len(work.draft)]

    engine.open(opening(1, prompt, max_tokens=2))  # ends before the head drafts, so that it has written no page
    while not engine.idle:
        engine.step()
    assert not any(kv.written_pages.values())
    first_drafts(2, [*prompt[:66], 5, 6])
    assert kv.known_rows[2] == 68
    assert sum(kv.written_pages.values()) == 4
    first_drafts(3, [*prompt[:50], 7, 8, 9])  # finds three cached pages, whose rows the head has written
    engine.abort()
    engine.step()  # reports the aborts
    first_drafts(4, prompt)
    engine.flush()
    assert not kv.written_pages
    engine.abort()
    assert not kv.known_rows


@pytest.mark.usefixtures("exact")
def test_rows_are_written_again_after_a_preemption(pair):
    """A preempted session computes its prompt again, and then has draft tokens as before."""
    target, folder, made = pair
    twin, model = Twin.of("EAGLE3", *made, target), with_head(target, folder)
    engine = drafting(model, max_total_tokens=256, disable_radix_cache=True)
    rng = np.random.default_rng(5)
    for i in (1, 2, 3):
        engine.open(opening(i, rng.integers(3, VOCAB, 60).tolist(), max_tokens=60))
    drafted = steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
        if engine.scheduler.preemptions and steps % 3 == 0:  # the twin is slow
            drafted += check_draft_tokens(twin, engine)[1]
    assert engine.scheduler.preemptions > 0
    assert drafted > 20


@pytest.mark.parametrize("window", [0.0, LONG])
def test_the_head_reads_a_long_prompt_in_chunks(tmp_path, window):
    """A step of the head has no more rows than a step of the model has tokens; then the head drafts."""
    target = write_cyclic_target(tmp_path / "target")
    model = with_head(target, write_perfect_eagle3(tmp_path / "head", target))
    engine = drafting(model, chunked_prefill_size=32, max_running_requests=8, coalesce_seconds=window)
    head, rows = engine.speculation.chooser.source.head, []
    draft = head.draft
    head.draft = lambda batch, cache: rows.append(len(batch)) or draft(batch, cache)
    start = int(CYCLE[3])
    prompt = [start, *cycle_text(start, 299)]
    requests = [opening(1, prompt, max_tokens=100), opening(2, [int(CYCLE[5])], max_tokens=100)]
    found = run(engine, requests)
    assert found.new == {1: cycle_text(prompt[-1], 100), 2: cycle_text(int(CYCLE[5]), 100)}
    assert max(rows) == 32
    assert found.accepted > 60  # plain steps go on until the head has caught up


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", [*CACHES, {"max_total_tokens": 256}])
def test_texts_equal_plain_decoding(tmp_path, temperature, flags):
    target = write_cyclic_target(tmp_path / "target", sharpness=0.2 if temperature else 1.0)
    model = with_head(target, write_perfect_eagle3(tmp_path / "head", target))
    rng = np.random.default_rng(1)
    requests = [
        opening(i, rng.choice(CYCLE, rng.integers(1, 60)).tolist(), SamplingParams(temperature, seed=i), max_tokens=50)
        for i in range(1, 9)
    ]
    run_as_plain(drafting, model, requests, **flags)
    run_as_plain(drafting, model, requests[:1], **flags)


@pytest.mark.parametrize("flags", [{"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"},
                                   {"kv_cache_dtype": "fp8_e4m3"}])  # fmt: skip
def test_texts_equal_plain_decoding_in_other_number_formats(tmp_path, flags):
    target = write_cyclic_target(tmp_path / "target")
    model = with_head(target, write_perfect_eagle3(tmp_path / "head", target), **flags)
    found = run_as_plain(drafting, model, [opening(1, [int(CYCLE[3])] * 20, max_tokens=200)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 200)
    assert found.accepted > 180, "the perfect head is accepted"


def test_probabilities_stay_within_bounds(tmp_path):
    target = write_cyclic_target(tmp_path / "target", sharpness=4.0)
    engine = drafting(with_head(target, write_perfect_eagle3(tmp_path / "head", target)))
    source, calls = engine.speculation.chooser.source, []
    draft = source.draft_tokens
    source.draft_tokens = lambda *args: calls.append(draft(*args)) or calls[-1]
    run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=60)])
    probabilities = np.concatenate([one.probabilities.ravel() for one in calls])
    assert (probabilities > 1 - 1e-6).any()
    assert ((probabilities >= 0) & (probabilities <= 1)).all()


@pytest.mark.usefixtures("exact")
def test_chain_length_follows_probabilities_and_costs(pair):
    """Chains are long where the head is sure, and drafting and verification are cheap."""
    target, folder, _ = pair
    engine = drafting(with_head(target, folder))
    source = engine.speculation.chooser.source

    def shape(rate, token_cost, drafting_cost):
        """Drafted and verified tokens of a session, by acceptance rate and costs as shares of a plain step."""
        engine.open(opening(1, [5, 6, 7], max_tokens=60))
        engine.step()
        engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1e-3 + 63 * token_cost * 1e-3})
        source.estimates.drafting_costs = {1: LinearCost(0.0, drafting_cost * 1e-3)}
        source.estimates.acceptance.table[:] = array("f", [rate] * 32)
        source.estimates.averages[True].drafted = 0.0
        (work,) = engine.plan().works
        drafted = round(source.estimates.averages[True].drafted / average.SLOW_WEIGHT)
        engine.abort()
        engine.step()  # reports the aborts
        return drafted, len(work.draft)

    assert shape(0.99, 0.01, 0.01)[0] > 8
    assert shape(0.99, 0.01, 0.01)[1] > 8
    drafted, verified = shape(0.5, 0.01, 0.05)
    assert 2 <= drafted <= 5
    assert drafted >= verified > 0
    assert shape(0.5, 0.01, 0.9)[0] == 1
    assert shape(0.01, 0.5, 0.01) == (1, 1), "a draft token that was made is verified"


def test_a_head_that_does_not_pay_is_used_in_probes_only(pair):
    """At temperature 1 a random head is rarely right: steps are plain, except for a probe now and then."""
    target, folder, _ = pair
    model = with_head(target, folder)

    def drafted(temperature, token_cost, steps=40):
        """Steps with draft tokens of the head."""
        engine = drafting(model)
        engine.speculation.chooser.always = False
        engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1e-3 + 63 * token_cost * 1e-3})
        engine.speculation.chooser.source.estimates.drafting_costs = {1: LinearCost(1e-4, 1e-4)}
        engine.speculation.chooser.source.estimates.averages = [
            head_estimates.ChainAverage(0.1, 2.0, 2.0),
            head_estimates.ChainAverage(2.0, 2.0, 2.0),
        ]
        engine.open(opening(1, [5, 6, 7], SamplingParams(temperature), max_tokens=400))
        engine.step()
        return sum(bool(len(engine.plan().works[0].draft)) for _ in range(steps))

    assert drafted(0.0, 0.05) == 40
    assert drafted(0.0, 2.0) == 0, "verification is expensive"
    assert drafted(1.0, 0.05) == 0, "acceptance of sampled sessions is measured apart"
    assert drafted(1.0, 0.05, base.PROBE_INTERVAL + 2) == 1


def test_calibration_bins_learn_acceptance_rates():
    bins = CalibrationBins()
    assert bins.rate(0.5, greedy=True) == pytest.approx(0.53, abs=0.01)
    for i in range(2000):
        bins.observe(0.1, accepted=i % 2 == 0, greedy=False)
    assert bins.rate(0.12, greedy=False) == pytest.approx(0.5, abs=0.02)
    assert bins.rate(0.12, greedy=True) < 0.2, "greedy sessions are measured apart"
    assert bins.rate(1.0, greedy=True) > 0.9
    for _ in range(2000):
        bins.observe(0.1, accepted=False, greedy=False)
    assert bins.rate(0.12, greedy=False) < 0.1, "old evidence decays"
    assert bins.table[16 + 1] == bins.rate(0.12, greedy=False)


def test_the_linear_cost_finds_both_parts():
    cost, rng = LinearCost(1.0, 1.0), np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 6))
        cost.observe(count, 0.3 + 0.1 * count + rng.normal(0, 0.01))
    assert cost.each == pytest.approx(0.1, abs=0.02)
    assert cost.fixed == pytest.approx(0.3, abs=0.05)
    for _ in range(300):
        cost.observe(2, 0.9)
    assert cost.seconds(2) == pytest.approx(0.9, abs=0.05), "with equal counts the slope stays as it was"
    cost.observe(2, 90.0)
    assert cost.seconds(2) < 1.0


def test_texts_equal_plain_decoding_with_a_random_head(pair):
    target, folder, _ = pair
    model = with_head(target, folder)
    rng = np.random.default_rng(2)
    requests = [
        opening(i, rng.integers(3, VOCAB, 30).tolist(), SamplingParams(1.0, seed=i), max_tokens=60) for i in range(1, 6)
    ]
    found = run(drafting(model), requests)
    assert found.new == run(engine_of(model), requests).new
    assert 0 < found.accepted < found.verified


def test_head_rows_of_a_page_that_another_session_computed_first(pair):
    """The second of two sessions with the same tokens uses the page of the first, which lacks the head's rows."""
    target, folder, _ = pair
    kv = drafting(with_head(target, folder)).speculation.chooser.source.kv
    kv.known_rows = {1: 10, 2: 40}
    kv.page_cached(1, 0, 7)
    assert kv.written_pages == {7: False}
    kv.page_cached(2, 0, 7)
    assert kv.known_rows[2] == 0, "its table refers to the other page"
    kv.page_cached(2, 1, 8)
    kv.page_taken(3, 0, 7)
    assert kv.known_rows[3] == 0
    kv.written_pages[7] = kv.written_pages[8] = True
    kv.page_taken(3, 0, 7)
    kv.page_taken(3, 1, 8)
    assert kv.known_rows[3] == 32
    kv.page_dropped(8)
    assert kv.written_pages == {7: True}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"vocab_size": 99}, "vocab_size is 99"),
    ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ({"norm_output": True}, "norm_output is True"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 77]}, "states must be of layers up to"),
    ({"intermediate_size": 11}, "mlp.gate_proj.weight is"),
    ({"head_dim": 577}, "no kernel for 4 heads of 577 numbers over 2 of keys"),
    ({"num_key_value_heads": 3}, "no kernel for 4 heads of 16 numbers over 3 of keys"),
    ({"num_attention_heads": None}, "lacks 'num_attention_heads'"),
])  # fmt: skip
def test_a_head_of_another_shape_is_refused(pair, tmp_path, wrong, message):
    target, _, (config, tensors) = pair
    changed = {name: value for name, value in (config | wrong).items() if value is not None}
    folder = write_head(tmp_path, changed, tensors)
    with pytest.raises(ConfigError, match=message):
        with_head(target, folder)


def test_a_head_with_wrong_tensors_is_refused(pair, tmp_path):
    target, _, (config, tensors) = pair
    wrong = {
        "whose head is the target's": (
            {n: t for n, t in tensors.items() if "lm_head" not in n},
            "lm_head.weight is missing",
        ),
        "lacks": ({name: t for name, t in tensors.items() if "o_proj" not in name}, "o_proj.weight is missing"),
        "more": (tensors | {"midlayer.self_attn.q_proj.bias": np.zeros(64, np.float32)}, "has no layers.0.*bias"),
        "ids": (tensors | {"d2t": tensors["d2t"] + 1000}, "d2t does not say"),
    }
    for name, (changed, message) in wrong.items():
        with pytest.raises(ConfigError, match=message):
            with_head(target, write_head(tmp_path / name, config, changed))


def test_the_sources_that_auto_chooses():
    large = nn.Linear(4096, 4096)

    def chosen(**flags):
        return plan_self_speculation(TargetConfig(device="cpu", **flags), large, None)

    assert chosen(quantization="int8") == chosen(quantization="int4") == SelfSpeculationPlan(True, None, DEFAULT_HEAD)
    assert chosen(dtype="bfloat16") == SelfSpeculationPlan(True, Format.INT4), "a copy drafts without the bundled head"
    assert chosen(dtype="bfloat16", self_speculation_format="int8") == SelfSpeculationPlan(True, Format.INT8)
    assert chosen(
        dtype="bfloat16", self_speculation="quantized", self_speculation_format="int8"
    ) == SelfSpeculationPlan(True, Format.INT8)
    assert chosen(self_speculation_head="folder") == SelfSpeculationPlan(True, None, Path("folder"))
    assert chosen(dtype="bfloat16", model_path="another") == SelfSpeculationPlan(True, Format.INT4)
    assert chosen(self_speculation="head").head == DEFAULT_HEAD
    assert chosen(quantization="int8", model_path="another") == SelfSpeculationPlan(True), (
        "no head is bundled for this model"
    )
    assert plan_self_speculation(TargetConfig(quantization="int8"), nn.Linear(8, 8), None) == SelfSpeculationPlan(), (
        "the model is small"
    )
    assert (
        plan_self_speculation(TargetConfig(quantization="int8"), large, "no compiled program") == SelfSpeculationPlan()
    )


def test_flags_of_the_head(pair, tmp_path):
    target, folder, _ = pair
    assert load_model(target, self_speculation_head=str(folder)).head is not None, (
        "--self-speculation-head selects the head"
    )
    for source in ("lookup", "quantized"):
        with pytest.raises(ConfigError, match=f"--self-speculation-head is not for --self-speculation {source}"):
            load_model(target, self_speculation=source, self_speculation_head=str(folder))
    with pytest.raises(ConfigError, match=r"name a folder with --self-speculation-head$"):
        load_model(target, self_speculation="head")
    with pytest.raises(ConfigError, match=r"--self-speculation head: .*leave it out"):
        load_model(target, self_speculation="head", self_speculation_head=str(folder), attention_backend="torch_native")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        with_head(target, tmp_path)
