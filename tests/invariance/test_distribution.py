"""Sampled text follows the model's distribution: a chi-square test of the engine's samples against the softmax."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Pair
from tests.support.tiny import write_model

PROMPT = [5, 9, 11, 3]
SESSIONS, BATCH = 3000, 60


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), seed=5, vocab=24)


@pytest.fixture(scope="module")
def engines(model):
    """Target and draft; every run leaves them empty."""
    return target_engine(model, max_running=BATCH), draft_engine("STANDALONE", model, max_running=BATCH)


def probabilities(folder, path, temperature, top_p):
    """The next token's distribution, by an independent implementation of the rules."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(torch.tensor([path])).logits[0, -1].detach().numpy() / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    order = np.argsort(-p)
    kept = order[: int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1] if top_p < 1 else order
    filtered = np.zeros_like(p)
    filtered[kept] = p[kept]
    return filtered / filtered.sum()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8)])
@pytest.mark.parametrize("drafter", [None, "self"])
def test_the_distribution_of_two_tokens(model, engines, drafter, temperature, top_p):
    target, draft = engines[0], engines[1] if drafter else None
    counts = np.zeros((24, 24))
    accepted = 0
    for first in range(0, SESSIONS, BATCH):
        params = [SamplingParams(temperature, top_p=top_p, seed=seed) for seed in range(first, first + BATCH)]
        stop = StopConditions(3, ignore_eos=True)
        prompt = np.array(PROMPT, np.uint32)
        run = Pair(target, (lambda: draft) if draft else None, draft_steps=20).run(
            [OpenSession(i, prompt, len(PROMPT), p, stop) for i, p in enumerate(params)]
        )
        accepted += run.accepted
        for tokens in run.tokens.values():
            counts[tokens[0], tokens[1]] += 1
    assert (accepted > 0.7 * SESSIONS) == (draft is not None)
    expected = probabilities(model, PROMPT, temperature, top_p)
    assert _fits(counts.sum(axis=1), expected) > 1e-4
    for token in np.argsort(-expected)[:3]:
        conditional = probabilities(model, [*PROMPT, int(token)], temperature, top_p)
        assert _fits(counts[token], conditional) > 1e-4


def _fits(counts, expected):
    """p-value of a chi-square test, with rare tokens merged into one cell."""
    assert counts[expected == 0].sum() == 0
    common = expected * counts.sum() >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected_counts = np.append(expected[common], expected[~common].sum()) * counts.sum()
    return stats.chisquare(observed[expected_counts > 0], expected_counts[expected_counts > 0]).pvalue
