"""The central tests: speculation never changes the text.

The same prompts and seeds, at temperature 0, 0.7 and 1.0, give identical tokens in float32 without a drafter; with
good, bad and malicious ones; with messages lost, doubled, delayed and reordered; with a draft engine that is killed;
alone and in a batch.
"""

import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.serving.messages import Grammar, GrammarKind
from tests.support.checkpoints.blocks import SECOND, dflash
from tests.support.checkpoints.heads import eagle, eagle3, parallel, write_head
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Faults, GarbageDraft, Pair, request
from tests.support.tiny import EOS, VOCAB, write_model, write_tokenizer

TEMPERATURES = [0.0, 0.7, 1.0]
PROMPTS = [
    [5, 6, 7], [9] * 10, [20, 21, 22, 20, 21], list(range(30, 75)), [200], [8, 7, 8, 7, 8, 7], [4, 310, 4], [99, 98, 97]
]  # fmt: skip
LENGTH = 36


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folders of a target, of an unrelated draft of the same vocabulary, of an EAGLE and an EAGLE-3 head, of two block
    drafters, and of a P-EAGLE head."""
    base = tmp_path_factory.mktemp("models")
    target = write_tokenizer(write_model(base / "target", "llama", seed=1))
    write_head(base / "eagle", *eagle(target))
    states = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}, "states": 2}
    write_head(base / "eagle3", *eagle3(target, **states))
    write_head(base / "parallel", *parallel(target, **states))
    write_head(base / "dflash", *dflash(target))
    write_head(base / "dflash2", *dflash(target, **SECOND))
    other = write_model(base / "other", "qwen3", seed=2)
    return target, other, base / "eagle", base / "eagle3", base / "dflash", base / "dflash2", base / "parallel"


@pytest.fixture(scope="session")
def target(models):
    """One target engine for all runs: no session may affect a later one."""
    return target_engine(models[0])


def requests(temperature, prompts=PROMPTS, **options):
    return [request(i, prompt, temperature, LENGTH, **options) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="session")
def plain(target):
    """The text without any drafter, by temperature; each session alone in its batch."""
    texts = {}
    for temperature in TEMPERATURES:
        runs = [Pair(target).run([one]) for one in requests(temperature)]
        texts[temperature] = {i: run.tokens[i] for i, run in enumerate(runs)}
        assert all(run.verified == 0 and run.steps == LENGTH for run in runs)
        assert all(len(tokens) == LENGTH for tokens in texts[temperature].values())
    assert texts[0.0] != texts[1.0]
    return texts


def test_greedy_text_equals_transformers(models, plain):
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for i, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTH, do_sample=False)
        assert text[0, len(prompt) :].tolist() == plain[0.0][i]


EIGHT_BITS = {"speculative_draft_model_quantization": "int8"}


def mapped(target):
    """Flags of a draft with a token map, which proposes some tokens of the vocabulary only."""
    torch.save(list(range(4, 200)), file := target.parent / "map.pt")
    return {"speculative_token_map": str(file)}


# Explicit trees of 4 children a node share their programs with adaptive ones; some drafters take a part of the batch.
DRAFTERS = {
    "ngram": lambda models: draft_engine("NGRAM"),
    "ngram by frequency": lambda models: draft_engine("NGRAM", match_type="PROB"),
    "standalone": lambda models: draft_engine("STANDALONE", models[1], max_running=4),
    "self": lambda models: draft_engine("STANDALONE", models[0]),
    "self, chain": lambda models: draft_engine("STANDALONE", models[0], tree=(4, 1, 5), max_running=4),
    "self, explicit tree": lambda models: draft_engine("STANDALONE", models[0], tree=(3, 4, 9)),
    "eagle, explicit tree": lambda models: draft_engine("EAGLE", models[2], models[0], tree=(3, 4, 9)),
    "ngram beside": lambda models: draft_engine("STANDALONE", models[1], beside=True, max_running=4),
    "ngram beside self": lambda models: draft_engine("STANDALONE", models[0], beside=True),
    "self, mapped": lambda models: draft_engine("STANDALONE", models[0], max_running=1, **mapped(models[0])),
    "self, in 8 bits": lambda models: draft_engine("STANDALONE", models[0], max_running=1, **EIGHT_BITS),
    "ngram beside self, on demand": lambda models: draft_engine(
        "STANDALONE", models[0], beside=True, max_running=4, draft_ahead="off"
    ),
    "eagle": lambda models: draft_engine("EAGLE", models[2], models[0]),
    "eagle 3": lambda models: draft_engine("EAGLE3", models[3], models[0], max_running=4),
    "eagle 3, waiting for features": lambda models: draft_engine(
        "EAGLE3", models[3], models[0], max_running=4, draft_ahead="off"
    ),
    "ngram beside eagle 3": lambda models: draft_engine("EAGLE3", models[3], models[0], beside=True, max_running=4),
    "ngram beside eagle 3, explicit tree": lambda models: draft_engine(
        "EAGLE3", models[3], models[0], beside=True, tree=(3, 4, 9), max_running=4
    ),
    "dflash": lambda models: draft_engine("DFLASH", models[4], models[0], max_running=4),
    "p-eagle": lambda models: draft_engine("EAGLE3", models[6], models[0], max_running=4),
    "ngram beside dflash 2, explicit tree": lambda models: draft_engine(
        "DFLASH", models[5], models[0], beside=True, tree=(3, 4, 9), max_running=4
    ),
}


class Drafters:
    """Drafters by name. Each is built once, and emptied of sessions and texts before each use."""

    def __init__(self, models):
        self.models, self.built = models, {}

    def __getitem__(self, name):
        return lambda: GarbageDraft(VOCAB) if name == "garbage" else self.fresh(name)

    def fresh(self, name):
        if name not in self.built:
            self.built[name] = DRAFTERS[name](self.models)
        engine = self.built[name]
        for session_id in list(engine.sessions):
            engine.close(session_id)
        engine.flush()
        engine._failures.clear()
        return engine


@pytest.fixture(scope="session")
def drafters(models):
    return Drafters(models)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("batch", "temperature"), [(8, 0.0), (8, 0.7), (1, 1.0)])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "garbage"])
def test_any_drafter(target, drafters, plain, drafter, temperature, batch):
    todo = requests(temperature)
    make = drafters[drafter]
    runs = [Pair(target, make).run(todo[i : i + batch]) for i in range(0, len(todo) if batch > 1 else 3, batch)]
    tokens = {i: text for run in runs for i, text in run.tokens.items()}
    assert tokens == {i: plain[temperature][i] for i in tokens}
    verified, accepted = sum(run.verified for run in runs), sum(run.accepted for run in runs)
    assert verified > 0, "no proposal was in time"
    if drafter == "self, chain":
        # Coupled sampling: the drafter proposes the target's own samples at any temperature.
        assert accepted / verified > 0.97
        if batch == 1:
            assert max(run.steps for run in runs) <= LENGTH / 8 * 1.5 + 2


FAULTY = ["ngram", "self", "ngram beside self", "eagle", "eagle 3", "eagle 3, waiting for features"]
FAULTS = {
    "lost": Faults(lost=0.3),
    "doubled": Faults(doubled=0.5),
    "delayed and reordered": Faults(delay=5),
    "all at once": Faults(lost=0.2, doubled=0.3, delay=4),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("drafter", [*FAULTY, "garbage"])
def test_transport_faults(target, drafters, plain, drafter, fault, temperature):
    seed = zlib.crc32(f"{drafter} {fault} {temperature}".encode())  # other faults for each
    for more in range(4):  # modes are measured by the real clock, so that a run may be plain but for a few steps
        run = Pair(target, drafters[drafter], FAULTS[fault], seed=seed + more).run(requests(temperature))
        assert run.tokens == plain[temperature]
        if run.accepted or not drafter.endswith("self"):
            break
    if drafter.endswith("self"):
        assert run.accepted > 0
        assert run.reopened > 0 or FAULTS[fault].lost == FAULTS[fault].delay == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "self", "eagle", "eagle 3"])
def test_a_draft_engine_killed_midway(target, drafters, plain, drafter, temperature):
    for back in (8, -1):
        pair = Pair(target, drafters[drafter], killed_from=4, killed_until=back)
        assert pair.run(requests(temperature)).tokens == plain[temperature]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_max_draft_tokens_of_sessions(target, drafters, plain, temperature):
    """One batch of sessions that verify none, at most two, or all draft tokens."""
    bounds = [(0, 2, None)[i % 3] for i in range(len(PROMPTS))]
    bounded = [replace(r, max_draft_tokens=most) for r, most in zip(requests(temperature), bounds, strict=True)]
    run = Pair(target, drafters["self"]).run(bounded)
    assert run.tokens == plain[temperature]
    for most in (0, 2):
        alone = Pair(target, drafters["self"]).run([replace(requests(temperature)[0], max_draft_tokens=most)])
        assert alone.tokens[0] == plain[temperature][0]
        assert (alone.verified, alone.steps) == (0, LENGTH) if most == 0 else 0 < alone.verified <= 2 * alone.steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_two_drafters_in_one_session(target, drafters, plain, temperature):
    """Two independent drafters propose for the same draft trees."""

    class Both:
        def __init__(self):
            self.engines = [drafters.fresh("ngram"), drafters.fresh("self")]

        def __getattr__(self, name):
            def call(*arguments):
                return [getattr(engine, name)(*arguments) for engine in self.engines][-1]

            return call

        @property
        def idle(self):
            return all(engine.idle for engine in self.engines)

        def step(self):
            outputs = [engine.step() for engine in self.engines]
            outputs[0].proposals += outputs[1].proposals
            return outputs[0]

    assert Pair(target, Both).run(requests(temperature)).tokens == plain[temperature]


def test_page_sizes_chunks_and_preemption(models, drafters, plain):
    for options in (
        {"page_size": 1, "max_step_tokens": 7},
        {"page_size": 64, "max_step_tokens": 13},
        {"page_size": 4, "max_total_tokens": 160},  # room for two sessions of eight
        {"max_running": 3},
    ):
        engine = target_engine(models[0], **options)
        run = Pair(engine, drafters["self"]).run(requests(1.0))
        assert run.tokens == plain[1.0], options


def test_a_restarted_target_continues_the_text(models, drafters, plain):
    """A session that is reopened with prompt and committed tokens continues with the same tokens."""
    for cut in (1, 17, LENGTH - 1):
        engine = target_engine(models[0])
        for i, prompt in enumerate(PROMPTS[:3]):
            text = plain[1.0][i]
            one = request(i, prompt, 1.0, LENGTH)
            resumed = type(one)(i, np.array(prompt + text[:cut], np.uint32), len(prompt), one.sampling, one.stop)
            assert Pair(engine, drafters["self"]).run([resumed]).tokens[i] == text


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}]
)
def test_filters_are_coupled(target, drafters, filters):
    todo = requests(1.0, **filters)
    alone = Pair(target).run(todo)
    run = Pair(target, drafters["self, chain"]).run(todo)
    assert run.tokens == alone.tokens
    assert run.acceptance > 0.97


PENALTIES = {
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    "bias": {"logit_bias": ((7, 6.0), (9, -100.0), (200, 5.0)), "frequency_penalty": 2.0, "top_p": 0.9},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_apply_along_each_path(target, drafters, plain, name, temperature):
    todo = requests(temperature, **PENALTIES[name])
    alone = {i: Pair(target).run([one]).tokens[i] for i, one in enumerate(todo)}
    assert all(alone[i] != plain[temperature][i] for i in alone)
    for drafter in ("self", "garbage", "ngram"):
        for batch in (1, 8):
            for first in range(0, len(todo) if batch > 1 else 2, batch):
                run = Pair(target, drafters[drafter], FAULTS["all at once"]).run(todo[first : first + batch])
                assert run.tokens == {i: alone[i] for i in run.tokens}
                assert run.accepted > 0 or drafter != "self"


GRAMMARS = [
    Grammar(GrammarKind.REGEX, "([a-d]{2,5}-)*[xyz]{1,3}!"),
    Grammar(GrammarKind.EBNF, 'start: "(" (start | /[0-9]{1,2}/)* ")"'),
    Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": [10, 12, 125, true, null]}, "maxItems": 9}'),
    None,
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammars_hold_on_each_path(target, drafters, temperature):
    """Sessions with grammars, some of them with penalties, beside others without."""
    todo = [
        replace(one, grammar=GRAMMARS[i % 4], sampling=replace(one.sampling, frequency_penalty=0.5 * (i // 4)))
        for i, one in enumerate(requests(temperature))
    ]
    alone = {i: Pair(target).run([one]).tokens[i] for i, one in enumerate(todo)}
    assert any(tokens[-1] == EOS for tokens in alone.values())
    for drafter in ("self", "garbage", "ngram"):
        for batch in (1, 8):
            for first in range(0, len(todo) if batch > 1 else 3, batch):
                run = Pair(target, drafters[drafter], FAULTS["delayed and reordered"]).run(todo[first : first + batch])
                assert run.tokens == {i: alone[i] for i in run.tokens}
    cut = {i: tokens[: len(tokens) // 2] for i, tokens in alone.items() if len(tokens) > 1}
    again = [
        replace(todo[i], tokens=np.concatenate([todo[i].tokens, np.array(tokens, np.uint32)]))
        for i, tokens in cut.items()
    ]
    assert Pair(target, drafters["self"]).run(again).tokens == {i: alone[i] for i in cut}
