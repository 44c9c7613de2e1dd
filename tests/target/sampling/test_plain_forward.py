"""Log-probabilities of rollouts against a plain forward of the same weights over prompt and answer.

Of output tokens, sampled in a batch with draft trees that are right in part, and of the same tokens as input.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.speculation.sampling import SamplingParams
from tests.support.target.driving import chain, engine_of, load_model, opening, prompts, random_tree, run
from tests.support.tiny import VOCAB, write_model

PROMPTS = prompts(4, longest=40, seed=3)
NEW = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("policy") / "model", seed=1, num_hidden_layers=3)


def rollouts(model):
    """Texts, and log-probabilities of all but the first token: those of the answers as output, and as input."""
    requests = [
        opening(i, prompt, SamplingParams(1.0, seed=i), max_tokens=NEW, logprobs=0) for i, prompt in enumerate(PROMPTS)
    ]
    plain = run(engine_of(model), requests).new
    likely = [prompt + plain[i] for i, prompt in enumerate(PROMPTS)]
    rng = np.random.default_rng(0)

    def proposals(session_id, path):
        right = likely[session_id][len(path) : len(path) + 4]
        return [chain(session_id, path, right), random_tree(rng, session_id, path, VOCAB, 4)]

    found = run(engine_of(model), requests, proposals)
    assert found.accepted > NEW
    texts = [prompt + found.new[i] for i, prompt in enumerate(PROMPTS)]  # rounding may have led them elsewhere
    read = run(engine_of(model), [opening(i, text, max_tokens=1, prompt_logprobs=0) for i, text in enumerate(texts)])
    pairs = []
    for i, prompt in enumerate(PROMPTS):
        as_input = read.commits[i][0].prompt_logprobs.values
        output = np.concatenate([commit.logprobs.values for commit in found.commits[i]])
        pairs.append((np.concatenate([as_input[: len(prompt) - 1], output]), as_input))
    return texts, pairs


def forward(folder, text, dtype, weights=torch.float32):
    """What transformers compute in a dtype. weights: to which they are rounded."""
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=weights).to(dtype)
    tokens = torch.tensor([text])
    with torch.inference_mode():
        scores = module(tokens).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(-1, tokens[0, 1:, None])[:, 0].numpy()


@pytest.mark.parametrize("flags", [{}, {"deterministic": True}, {"attention_backend": "torch_native"}])
def test_in_float32_they_are_equal(folder, flags):
    """Output and input to the last bit where a token's bits do not depend on the batch. Rounding is that of
    transformers.
    """
    texts, pairs = rollouts(load_model(folder, **flags))
    for text, (output, read) in zip(texts, pairs, strict=True):
        exact, plain = forward(folder, text, torch.float64), forward(folder, text, torch.float32)
        rounding = np.abs(plain - exact).max()
        if flags.get("deterministic"):
            np.testing.assert_array_equal(output, read)
        for found in (output, read):
            assert np.abs(found - exact).max() < 3 * rounding < 1e-4


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
def test_in_bfloat16_they_are_as_close_to_float32_as_a_plain_forward_is(folder, backend):
    """The bound that docs/rollouts.md states; against a plain forward in bfloat16, by the triangle inequality."""

    def size(values):
        return float(np.sqrt(np.mean(np.square(values))))

    texts, pairs = rollouts(load_model(folder, dtype="bfloat16", attention_backend=backend))
    exact = np.concatenate([forward(folder, text, torch.float32, torch.bfloat16) for text in texts])
    plain = np.concatenate([forward(folder, text, torch.bfloat16, torch.bfloat16) for text in texts])
    rounding = plain - exact
    assert 0.01 < size(rounding) < 0.2, "a bound that says something"
    for found in map(np.concatenate, zip(*pairs, strict=True)):
        assert size(found - exact) <= 1.5 * size(rounding)
        assert size(found - plain) <= 2.5 * size(rounding)
        assert np.abs(found - exact).max() <= 2 * np.abs(rounding).max()
