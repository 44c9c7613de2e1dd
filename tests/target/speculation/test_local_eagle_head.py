"""A head in the target's own process drafts what its formulas say, and changes no text."""

from array import array
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams, log_softmax, sample
from services.target.engine.engine import TargetEngine
from services.target.kernels.cpu import library
from services.target.kernels.cpu.weights import Format
from services.target.model import eagle_head_weights
from services.target.model.loading.self_speculation import SelfSpeculationPlan, plan_self_speculation
from services.target.speculation.estimates.calibration_bins import CalibrationBins
from services.target.speculation.estimates.step_cost import StepCost
from services.target.speculation.mode_selector import SpeculationMode
from services.target.speculation.sources import base
from services.target.speculation.sources import local_eagle_head as headdraft
from tests.support.checkpoints.heads import write_head, write_pair
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.twin import Twin
from tests.support.target.driving import CACHES, engine_of, load_model, opening, run, run_as_plain
from tests.support.tiny import VOCAB

LAYERS = [-1, 0, 1]  # whose outputs are the states, of a target of two layers; -1 is the embedding

pytestmark = pytest.mark.skipif(not library.available(), reason="heads are of compiled programs")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS)


@pytest.fixture
def exact(monkeypatch):
    """Heads in the format of their twin."""
    monkeypatch.setattr(eagle_head_weights, "FORMAT", Format.FLOAT32)


def with_head(target, folder, **flags):
    return load_model(target, self_speculation="head", self_speculation_head=str(folder), **flags)


def drafting(model, **flags):
    """An engine whose head drafts in every step, whether that pays or not."""
    small = {"page_size": 16, "max_total_tokens": 4096, "chunked_prefill_size": 512, "coalesce_seconds": 0.0}
    engine = TargetEngine(model, TargetConfig(**(small | flags)), (SpeculationMode.SELF_SPECULATE,))
    engine.speculation.chooser.looks_up = False  # tests/target/speculation/test_prompt_lookup.py has what texts repeat
    engine.speculation.chooser.always = True
    engine.speculation.chooser.source.pays = lambda *_: True
    return engine


def foretold(twin, engine, session, tokens):
    """The twin's logits [V] before each of some tokens behind a session, from the states in the cache."""
    slots = session.table.slots(0, session.length - 1)
    states = engine.cache.states.flatten(0, 1)[slots].numpy()
    features = states @ twin.tensors["fc.weight"].T
    path = session.tokens.tolist()
    for token in tokens:
        logits = np.full(VOCAB, -np.inf)
        said = twin.log_probs(path, features)
        logits[list(said)] = list(said.values())
        yield logits
        path.append(token)


def check_guesses(twin, engine):
    """Guesses, those that come second, and what the head says of both are the twin's. Returns what was verified."""
    draft, guesses = engine.speculation.chooser.source._draft, []
    engine.speculation.chooser.source._draft = lambda *args: guesses.append((args[0], draft(*args))) or guesses[-1][1]
    works = engine._plan().works
    engine.speculation.chooser.source._draft = draft
    count = 0
    for some, said in guesses:
        for place, work in enumerate(some):
            session = work.chunk.session
            params, tokens = session.sampling, said.tokens[:, place].tolist()
            for depth, logits in enumerate(foretold(twin, engine, session, tokens)):
                second, position = logits.copy(), session.length + depth
                second[tokens[depth]] = -np.inf
                assert tokens[depth] == sample(logits, params, position)
                assert said.seconds[depth, place] == sample(second, params, position)
                heat = params.temperature or 1.0
                first, other = tokens[depth], said.seconds[depth, place]
                told = np.exp(log_softmax(logits / heat)[first]), np.exp(log_softmax(second / heat)[other])
                assert said.odds[depth, place] == pytest.approx(told, rel=1e-2)
                count += 1
    return works, count


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("options", [
    {}, {"norm_before_residual": True}, {"rope_theta": 500.0}, {"first": "layers.0."},
    {"rope_theta": "absent", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
])  # fmt: skip
def test_it_drafts_what_its_twin_says(tmp_path, options):
    target, folder, made = write_pair(tmp_path, "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS, **options)
    twin, model = Twin.of("EAGLE3", *made, target), with_head(target, folder)
    for page_size in (1, 16):
        engine = drafting(model, page_size=page_size)
        rng = np.random.default_rng(0)
        for i, length in enumerate((1, 2, 3, 16, 17, 40), 1):
            params = SamplingParams(i % 2, seed=i, top_k=[0, 30][i // 4])
            engine.open(opening(i, rng.integers(3, VOCAB, length).tolist(), params, max_tokens=40))
        engine.step()
        assert sum(check_guesses(twin, engine)[1] for _ in range(6) if engine.step()) >= 36


@pytest.mark.usefixtures("exact")
def test_pages_of_others_are_as_good_as_its_own(pair):
    target, folder, made = pair
    twin, model = Twin.of("EAGLE3", *made, target), with_head(target, folder)
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, VOCAB, 70).tolist()
    engine = drafting(model)
    rows = engine.speculation.chooser.source.rows

    def first_drafts(session_id, tokens):
        engine.open(opening(session_id, tokens, max_tokens=9))
        engine.step()
        works, _ = check_guesses(twin, engine)
        assert session_id in [work.chunk.session.id for work in works if len(work.draft)]

    engine.open(opening(1, prompt, max_tokens=2))  # ends before anything is drafted: the head has written no page
    while not engine.idle:
        engine.step()
    assert not any(rows._written.values())
    first_drafts(2, [*prompt[:66], 5, 6])
    assert rows._known[2] == 68
    assert sum(rows._written.values()) == 4
    first_drafts(3, [*prompt[:50], 7, 8, 9])  # finds three pages, all of which the head has written
    engine.abort()
    engine.step()  # tells of it
    first_drafts(4, prompt)
    engine.flush()
    assert not rows._written
    engine.abort()
    assert not rows._known


@pytest.mark.usefixtures("exact")
def test_rows_that_were_lost_are_written_again(pair):
    """A session loses its pages, computes its prompt again, and is drafted for as before."""
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
        if engine.scheduler.preemptions and steps % 3 == 0:  # the twin takes its time
            drafted += check_guesses(twin, engine)[1]
    assert engine.scheduler.preemptions > 0
    assert drafted > 20


@pytest.mark.parametrize("gather", [0.0, 60.0])
def test_a_long_prompt_is_read_in_pieces(tmp_path, gather):
    """No step of the head has more rows than one of the model may have; then it drafts as ever."""
    target = write_cyclic_target(tmp_path / "target")
    model = with_head(target, write_perfect_eagle3(tmp_path / "head", target))
    engine = drafting(model, chunked_prefill_size=32, max_running_requests=8, coalesce_seconds=gather)
    head, rows = engine.speculation.chooser.source._head, []
    draft = head.draft
    head.draft = lambda batch, cache: rows.append(len(batch)) or draft(batch, cache)
    start = int(CYCLE[3])
    prompt = [start, *cycle_text(start, 299)]
    requests = [opening(1, prompt, max_tokens=100), opening(2, [int(CYCLE[5])], max_tokens=100)]
    found = run(engine, requests)
    assert found.new == {1: cycle_text(prompt[-1], 100), 2: cycle_text(int(CYCLE[5]), 100)}
    assert max(rows) == 32
    assert found.accepted > 60  # though plain steps go on meanwhile


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("flags", [*CACHES, {"max_total_tokens": 256}])
def test_texts_are_those_of_plain_steps(tmp_path, temperature, flags):
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
def test_in_other_formats_too(tmp_path, flags):
    target = write_cyclic_target(tmp_path / "target")
    model = with_head(target, write_perfect_eagle3(tmp_path / "head", target), **flags)
    found = run_as_plain(drafting, model, [opening(1, [int(CYCLE[3])] * 20, max_tokens=200)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 200)
    assert found.accepted > 180, "what can be known is known"


def test_what_it_says_of_others_is_a_probability_however_sure_it_is(tmp_path):
    target = write_cyclic_target(tmp_path / "target", sharpness=4.0)
    engine = drafting(with_head(target, write_perfect_eagle3(tmp_path / "head", target)))
    draft, said = engine.speculation.chooser.source._draft, []
    engine.speculation.chooser.source._draft = lambda *args: said.append(draft(*args)) or said[-1]
    run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=60)])
    odds = np.concatenate([one.odds.reshape(-1, 2) for one in said])
    assert (odds[:, 0] > 1 - 1e-6).any(), "it is so sure that nothing is left of others beside it"
    assert ((odds >= 0) & (odds <= 1)).all()


@pytest.mark.usefixtures("exact")
def test_chains_are_as_long_as_they_pay(pair):
    """As long as the head is sure, and guesses and rows cost little."""
    target, folder, _ = pair
    engine = drafting(with_head(target, folder))
    chains = engine.speculation.chooser.source

    def shape(odds, row, each):
        """Of a session of which the head says so: guesses that are drafted, and rows that are verified."""
        engine.open(opening(1, [5, 6, 7], max_tokens=60))
        engine.step()
        engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1e-3 + 63 * row * 1e-3})
        chains._costs = {1: StepCost({1: each * 1e-3, 16: 16 * each * 1e-3})}
        chains.acceptance.table[:] = array("f", [odds] * 32)
        chains._averages[True].drafted = 0.0
        chains._values.forget()
        (work,) = engine._plan().works
        drafted = round(chains._averages[True].drafted / headdraft._EMA_WEIGHT)
        engine.abort()
        engine.step()  # tells of it
        return drafted, len(work.draft)

    assert shape(0.99, 0.01, 0.01)[0] > 8
    assert shape(0.99, 0.01, 0.01)[1] > 8
    drafted, verified = shape(0.5, 0.01, 0.05)
    assert 2 <= drafted <= 5
    assert drafted <= verified <= drafted + 2
    assert shape(0.5, 0.01, 0.9)[0] == 1
    drafted, verified = shape(0.01, 0.5, 0.01)
    assert drafted == 1 <= verified <= 2, "a guess that is there is verified"


def test_what_cannot_pay_is_tried_seldom(pair):
    """At temperature 1 a random head is of no use: plain steps follow one another, but for a trial now and then."""
    target, folder, _ = pair
    model = with_head(target, folder)

    def drafted(temperature, row, steps=40):
        """In how many of some steps the head drafts."""
        engine = drafting(model)
        del engine.speculation.chooser.source.pays
        engine.speculation.chooser.always = False
        engine.speculation.planner.budget.cost = StepCost({1: 1e-3, 64: 1e-3 + 63 * row * 1e-3})
        engine.speculation.chooser.source._costs = {1: StepCost({1: 2e-4, 16: 17e-4})}
        engine.speculation.chooser.source._averages = [
            headdraft._ChainAverage(0.1, 2.0, 2.0),
            headdraft._ChainAverage(2.0, 2.0, 2.0),
        ]
        engine.open(opening(1, [5, 6, 7], SamplingParams(temperature), max_tokens=400))
        engine.step()
        return sum(bool(len(engine._plan().works[0].draft)) for _ in range(steps))

    assert drafted(0.0, 0.05) == 40
    assert drafted(0.0, 2.0) == 0, "rows are dear"
    assert drafted(1.0, 0.05) == 0, "what sampled sessions accept is another matter"
    assert drafted(1.0, 0.05, base._PROBE_INTERVAL + 2) == 1


def test_odds_are_put_right():
    odds = CalibrationBins()
    assert odds.rate(0.5, greedy=True) == pytest.approx(0.53, abs=0.01)
    for i in range(2000):
        odds.observe(0.1, accepted=i % 2 == 0, greedy=False)
    assert odds.rate(0.12, greedy=False) == pytest.approx(0.5, abs=0.02)
    assert odds.rate(0.12, greedy=True) < 0.2, "greedy sessions are others"
    assert odds.rate(1.0, greedy=True) > 0.9
    for _ in range(2000):
        odds.observe(0.1, accepted=False, greedy=False)
    assert odds.rate(0.12, greedy=False) < 0.1, "what was long ago counts less"
    assert odds.table[16 + 1] == odds.rate(0.12, greedy=False)


def test_the_cost_of_drafting_is_found_at_each_depth():
    cost, rng = StepCost({1: 2.0, 6: 7.0, 16: 17.0}), np.random.default_rng(0)
    for _ in range(300):
        count = int(rng.integers(1, 6))
        cost.observe(count, 0, 0.3 + 0.1 * count + rng.normal(0, 0.01))
    assert cost.step(2, 0)[1] == pytest.approx(0.1, abs=0.05)
    assert cost.step(2, 0)[0] == pytest.approx(0.5, abs=0.05)
    cost.observe(2, 0, 90.0)
    assert cost.step(2, 0)[0] < 1.0


def test_a_random_head_changes_nothing(pair):
    target, folder, _ = pair
    model = with_head(target, folder)
    rng = np.random.default_rng(2)
    requests = [
        opening(i, rng.integers(3, VOCAB, 30).tolist(), SamplingParams(1.0, seed=i), max_tokens=60) for i in range(1, 6)
    ]
    found = run(drafting(model), requests)
    assert found.new == run(engine_of(model), requests).new
    assert 0 < found.accepted < found.verified


def test_a_page_that_another_session_computed_first(pair):
    """Both compute the same tokens; the second one's table takes the first one's page, which no head has written."""
    target, folder, _ = pair
    rows = drafting(with_head(target, folder)).speculation.chooser.source.rows
    rows._known = {1: 10, 2: 40}
    rows.page_cached(1, 0, 7)
    assert rows._written == {7: False}
    rows.page_cached(2, 0, 7)
    assert rows._known[2] == 0, "its rows are those of the other page now"
    rows.page_cached(2, 1, 8)
    rows.page_taken(3, 0, 7)
    assert rows._known[3] == 0
    rows._written[7] = rows._written[8] = True
    rows.page_taken(3, 0, 7)
    rows.page_taken(3, 1, 8)
    assert rows._known[3] == 32
    rows.page_dropped(8)
    assert rows._written == {7: True}


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
def test_heads_that_do_not_fit(pair, tmp_path, wrong, message):
    target, _, (config, tensors) = pair
    changed = {name: value for name, value in (config | wrong).items() if value is not None}
    folder = write_head(tmp_path, changed, tensors)
    with pytest.raises(ConfigError, match=message):
        with_head(target, folder)


def test_tensors_that_do_not_fit(pair, tmp_path):
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


def test_what_auto_takes():
    large = nn.Linear(4096, 4096)

    def means(**flags):
        return plan_self_speculation(TargetConfig(device="cpu", **flags), large, None)

    assert means(quantization="int8") == means(quantization="int4") == SelfSpeculationPlan(True, None, DEFAULT_HEAD)
    assert means(dtype="bfloat16") == SelfSpeculationPlan(True, Format.INT4, DEFAULT_HEAD)
    assert means(dtype="bfloat16", self_speculation="quantized", self_speculation_format="int8") == SelfSpeculationPlan(
        True, Format.INT8
    )
    assert means(
        self_speculation="quantized", self_speculation_format="int8", self_speculation_head="folder"
    ) == SelfSpeculationPlan(True, Format.INT8, Path("folder"))
    assert means(self_speculation_head="folder") == SelfSpeculationPlan(True, None, Path("folder"))
    assert means(dtype="bfloat16", model_path="another") == SelfSpeculationPlan(True, Format.INT4)
    assert means(self_speculation="head").head == DEFAULT_HEAD
    assert means(quantization="int8", model_path="another") == SelfSpeculationPlan(True), (
        "which no head comes along for"
    )
    assert plan_self_speculation(TargetConfig(quantization="int8"), nn.Linear(8, 8), None) == SelfSpeculationPlan(), (
        "it is read from caches"
    )
    assert plan_self_speculation(TargetConfig(quantization="int8"), large, "it is no program") == SelfSpeculationPlan()


def test_flags(pair, tmp_path):
    target, folder, _ = pair
    assert load_model(target, self_speculation_head=str(folder)).head is not None, "who names one wants it"
    with pytest.raises(ConfigError, match="--self-speculation-head is not for"):
        load_model(target, self_speculation="lookup", self_speculation_head=str(folder))
    with pytest.raises(ConfigError, match=r"name a folder with --self-speculation-head$"):
        load_model(target, self_speculation="head")
    with pytest.raises(ConfigError, match=r"--self-speculation head: .*leave it out"):
        load_model(target, self_speculation="head", self_speculation_head=str(folder), attention_backend="torch_native")
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        with_head(target, tmp_path)
