"""Texts never change with overlap and verification on the device, as on CUDA; run on the CPU."""

import pytest

from tests.support.invariance.engines import as_on_cuda, draft_engine, target_engine
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
def plain(folder):
    return target_engine(folder)


@pytest.fixture(scope="module", params=["waiting", "prepared"])
def engine(request, folder):
    """An engine that works as on CUDA: steps with draft tokens one by one, or prepared by the device."""
    return as_on_cuda(target_engine(folder, page_size=4), prepares=request.param == "prepared")


@pytest.fixture(scope="module")
def self_draft(folder):
    """One engine; every run leaves it empty."""
    return draft_engine("STANDALONE", folder)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("drafter", [None, "ngram", "self", "garbage"])
def test_the_text_never_changes(self_draft, plain, engine, drafter, options, temperature):
    makers = {
        "ngram": lambda: draft_engine("NGRAM"),
        "self": lambda: self_draft,
        "garbage": lambda: GarbageDraft(VOCAB),
    }
    requests = [request(i, prompt, temperature, 32, **OPTIONS[options]) for i, prompt in enumerate(PROMPTS)]
    expected = Pair(plain).run(requests).tokens
    found = Pair(engine, makers.get(drafter), Faults(lost=0.1, doubled=0.2, delay=2)).run(requests)
    assert found.tokens == expected
    if drafter in (None, "self") or not engine.launcher.prepares:  # of other drafters' tokens, few or none survive
        assert (found.verified > 0) == (drafter is not None)
