"""Log-probabilities: the model's own, of every committed token and of the prompt, however the tokens came."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.errors import InvalidRequest
from outrider.speculation.sampling import SamplingParams, logprobs
from services.target.sampling import logprobs as device
from tests.support.target.driving import GREEDY, chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model

PROMPT = [5, 6, 7, 5, 9, 11, 3, 8, 200, 17, 4]
PARAMS = SamplingParams(
    0.8, seed=4, top_k=20, frequency_penalty=1.0, repetition_penalty=1.2, logit_bias=((5, 20.0), (9, -100.0))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def expected(folder):
    """What transformers' logits of a whole text say: of every token but the first, with a number of the likeliest."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def compute(text, top, temperature=1.0):
        with torch.inference_mode():
            logits = module(torch.tensor([text])).logits[0, :-1].div(temperature).numpy()
        return logprobs(logits, np.array(text[1:]), 1, top)

    return compute


def close(reported, expected):
    """The same tokens, and the same numbers but for the last bits."""
    part = expected.behind(reported.first - expected.first)
    np.testing.assert_allclose(reported.values, part.values[: len(reported)], atol=2e-5)
    np.testing.assert_array_equal(reported.top_tokens, part.top_tokens[: len(reported), : reported.top_tokens.shape[1]])
    np.testing.assert_allclose(
        reported.top_values, part.top_values[: len(reported), : reported.top_values.shape[1]], atol=2e-5
    )


def whole(commits):
    """The log-probabilities of all new tokens; the commits must report every token once."""
    reported = [commit.logprobs for commit in commits]
    assert [len(one) for one in reported] == [len(commit.tokens) for commit in commits]
    assert [one.first for one in reported] == [commit.base_length for commit in commits]
    return type(reported[0])(
        reported[0].first,
        *(np.concatenate([getattr(one, name) for one in reported]) for name in ("values", "top_tokens", "top_values")),
    )


def test_scores_on_the_device_are_those_of_the_oracle(monkeypatch):
    logits = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32) * 4
    tokens = np.random.default_rng(1).integers(0, 300, 40)
    monkeypatch.setattr(device, "_PIECE_BYTES", 7 * 300 * 4)  # several pieces
    rows = torch.arange(39, -1, -1)
    scores = device.score(torch.from_numpy(logits), rows, torch.from_numpy(tokens[::-1].copy()), 5)
    close(scores.logprobs(0, list(range(39, -1, -1)), 3), logprobs(logits, tokens, 0, 5))


@pytest.mark.parametrize("params", [GREEDY, PARAMS], ids=["greedy", "sampled, penalised"])
def test_new_tokens_have_the_models_own_logprobs(model, expected, params):
    requests = [
        opening(1, PROMPT, params, max_tokens=30, logprobs=5),
        opening(2, PROMPT[3:], params, max_tokens=30),
        opening(3, PROMPT[5:], params, max_tokens=30, logprobs=0),
        opening(4, PROMPT[2:], params, max_tokens=30, logprobs=20),
        replace(opening(5, PROMPT[1:], params, max_tokens=30, logprobs=3), scaled_logprobs=True),
    ]
    plain = run(engine_of(model), requests)
    rng = np.random.default_rng(0)
    texts = {request.session_id: [*request.tokens.tolist(), *plain.new[request.session_id]] for request in requests}

    def proposals(session_id, path):
        right = texts[session_id][len(path) : len(path) + 4]
        return [chain(session_id, path, right), random_tree(rng, session_id, path, VOCAB, 4)]

    speculative = run(engine_of(model), requests, proposals)
    assert speculative.new == plain.new
    assert speculative.accepted > 30
    for result in (plain, speculative):
        assert all(commit.logprobs is None and commit.prompt_logprobs is None for commit in result.commits[2])
        for request in requests:
            if request.logprobs is not None:
                reported = whole(result.commits[request.session_id])
                assert reported.top_tokens.shape == (30, request.logprobs)
                divisor = (params.temperature or 1.0) if request.scaled_logprobs else 1.0
                close(reported, expected(texts[request.session_id], 20, divisor))


@pytest.mark.parametrize(
    "flags", [{}, {"chunked_prefill_size": 4, "max_running_requests": 3}, {"chunked_prefill_size": -1}]
)
def test_prompts_have_logprobs_too_in_any_chunks(model, expected, flags):
    requests = [
        opening(1, PROMPT, max_tokens=3, prompt_logprobs=2, logprobs=1),
        opening(2, PROMPT * 3, max_tokens=3, prompt_logprobs=0),
        opening(3, PROMPT[:1], max_tokens=3, prompt_logprobs=3),
    ]
    engine = engine_of(model, **flags)
    for _ in range(2):  # the second time, the prefix cache knows the prompts
        result = run(engine, requests)
        for request in requests:
            first, *others = result.commits[request.session_id]
            assert all(commit.prompt_logprobs is None for commit in others)
            reported = first.prompt_logprobs
            assert (reported.first, len(reported)) == (1, request.prompt_length - 1)
            assert reported.top_tokens.shape[1] == request.prompt_logprobs
            if len(reported):
                close(reported, expected(request.tokens.tolist(), 3))
    close(whole(result.commits[1]), expected([*PROMPT, *result.new[1]], 1))


def test_few_rows_of_a_prompt_are_scored_in_a_step(model, expected, monkeypatch):
    monkeypatch.setattr(device, "_SCORED_BYTES", 16 * 4 * VOCAB)
    prompts = [PROMPT * 5, PROMPT * 4]
    requests = [opening(i, text, max_tokens=3, prompt_logprobs=2) for i, text in enumerate(prompts)]
    engine = engine_of(model)
    sizes = []
    forward = engine.model.runner.forward

    class Counting:
        def forward(self, batch, cache):
            sizes.append(len(batch.rows.sampled) - batch.sample_count)
            return forward(batch, cache)

    engine.launcher.model = replace(model, runner=Counting())
    result = run(engine, requests)
    assert max(sizes) == 16
    assert sum(sizes) == 54 + 43
    for i, text in enumerate(prompts):
        close(result.commits[i][0].prompt_logprobs, expected(text, 2))


def test_a_tiny_pool_preempts_and_tells_all_the_same(model, expected):
    requests = [opening(i, [*PROMPT, i], max_tokens=40, logprobs=2, prompt_logprobs=1) for i in range(4)]
    engine = engine_of(model, page_size=4, max_total_tokens=112)
    result = run(engine, requests)
    assert engine.scheduler.preemptions > 0
    for i, commits in result.commits.items():
        text = [*PROMPT, i, *result.new[i]]
        close(whole(commits), expected(text, 2))
        close(commits[0].prompt_logprobs, expected(text[:12], 1))


def test_a_session_opened_again_goes_on_telling(model, expected):
    text = run(engine_of(model), [opening(1, PROMPT, PARAMS, max_tokens=20)]).new[1]
    again = opening(1, PROMPT, PARAMS, max_tokens=20, committed=text[:7], logprobs=3, prompt_logprobs=3)
    result = run(engine_of(model), [again])
    assert text[:7] + result.new[1] == text
    close(whole(result.commits[1]), expected([*PROMPT, *text], 3))
    assert all(commit.prompt_logprobs is None for commit in result.commits[1])


def test_too_many_are_refused(model):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequest) as error:
            engine_of(model).open(opening(1, PROMPT, **{name: 21}))
        assert error.value.param == name
