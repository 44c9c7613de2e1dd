"""The text never changes where steps overlap and trees are walked on the device: a CUDA device's ways, on the CPU."""

import pytest

from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Faults, GarbageDraft, Pair, request
from tests.support.tiny import VOCAB, write_model, write_tokenizer

PROMPTS = [[5, 6, 7], [9] * 10, list(range(30, 75)), [8, 7, 8, 7, 8, 7], [200]]
OPTIONS = {
    "plain": {},
    "filters": {"top_k": 20, "top_p": 0.9},
    "nucleus": {"top_p": 0.8},
    "penalties": {"frequency_penalty": 0.6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(scope="module")
def engines(folder):
    """One that works as on a CPU, and one that works as on CUDA."""
    engine = target_engine(folder, page_size=4)
    engine.overlap = True
    engine.sampler._compiled, engine.sampler._walks, engine.sampler._async = False, True, True
    return target_engine(folder), engine


@pytest.fixture(scope="module")
def self_draft(folder):
    """One engine; every run leaves it empty."""
    return draft_engine("STANDALONE", folder)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", [None, "ngram", "self", "garbage"])
def test_the_text_never_changes(self_draft, engines, drafter, options, temperature):
    makers = {
        "ngram": lambda: draft_engine("NGRAM"),
        "self": lambda: self_draft,
        "garbage": lambda: GarbageDraft(VOCAB),
    }
    plain, engine = engines
    todo = [request(i, prompt, temperature, 32, **OPTIONS[options]) for i, prompt in enumerate(PROMPTS)]
    expected = Pair(plain).run(todo).tokens
    found = Pair(engine, makers.get(drafter), Faults(lost=0.1, doubled=0.2, delay=2)).run(todo)
    assert found.tokens == expected
    assert (found.verified > 0) == (drafter is not None)
