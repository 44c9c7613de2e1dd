"""Penalties and bias: every row as the oracle has it, along its own path, whatever was committed how."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.speculation.acceptance import decode
from outrider.speculation.sampling import SamplingParams, adjusted, sample
from services.target.sampling import penalties, sampler
from services.target.sampling.penalties import PenaltyCounts
from services.target.sampling.row_params import RowRequest, gather
from tests.support.target.driving import chain, engine_of, load_model, opening, random_tree, run
from tests.support.target.works import repetitive_slice
from tests.support.tiny import VOCAB, write_model

V = 40
CPU = torch.device("cpu")


def paths_of(path, draft):
    paths = [path]
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths.append([*paths[parent + 1], token])
    return paths


@st.composite
def params_of(draw):
    some = st.booleans()
    biased = draw(st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=6)) if draw(some) else {}
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        top_k=draw(st.sampled_from([0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=draw(st.floats(-2, 2)) if draw(some) else 0.0,
        frequency_penalty=draw(st.floats(-2, 2)) if draw(some) else 0.0,
        repetition_penalty=draw(st.floats(0.1, 10)) if draw(some) else 1.0,
        logit_bias=tuple(biased.items()),
    )


@pytest.mark.parametrize("count", [63, 64, 65, 128, 129, 1000])
@pytest.mark.parametrize("biased", [0, 3])
def test_prompts_of_many_tokens(count, biased):
    """As oracles have them, however many tokens a text has of which something is known."""
    bias = tuple((token, 1.0 + token) for token in range(biased))
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, logit_bias=bias)
    prompt, output = np.random.default_rng(0).permutation(count), np.array([count, 1, count + 1])
    tally = PenaltyCounts(params, np.concatenate([prompt, output[:1]]), count)
    tally.append(output[1:])
    logits = np.random.default_rng(1).standard_normal(count + 5).astype(np.float32)
    tokens, scales, shifts = tally.shared()
    changed = logits.astype(np.float64)
    changed[tokens] = np.where(changed[tokens] > 0, changed[tokens] / scales, changed[tokens] * scales) + shifts
    np.testing.assert_allclose(changed, adjusted(logits, params, prompt, output), rtol=1e-6)


@settings(max_examples=150, deadline=None)
@given(sessions=st.lists(params_of(), min_size=1, max_size=4), seed=st.integers(0, 2**32 - 1))
def test_rows_are_those_of_the_oracle(sessions, seed):
    rng = np.random.default_rng(seed)
    requests, tallies, expected, drawn, first = [], [], [], [], 0
    logits = []
    for params in sessions:
        prompt, output = rng.integers(0, 10, rng.integers(1, 20)), rng.integers(0, 10, rng.integers(0, 20))
        draft = repetitive_slice(rng, int(rng.integers(0, 7)))
        cut = int(rng.integers(0, len(output) + 1))
        tally = PenaltyCounts(params, np.concatenate([prompt, output[:cut]]), len(prompt))
        tally.append(output[cut:])  # as commits bring them
        rows = paths_of([*prompt.tolist(), *output.tolist()], draft)
        if params.adjusts:
            tallies.append((first, tally, draft))
        requests.append(RowRequest(params, [len(row) for row in rows], [[]] * len(rows)))
        for row in rows:
            one = (rng.standard_normal(V) * 3).astype(np.float32)
            logits.append(one)
            changed = adjusted(one, params, np.array(row[: len(prompt)]), np.array(row[len(prompt) :], np.int64))
            expected.append(changed)
            drawn.append(sample(changed, params, len(row)))
        first += len(rows)
    adjustments = penalties.gather(tallies, CPU)
    given_logits = torch.from_numpy(np.stack(logits))
    assert sampler.sample(given_logits, gather(requests, CPU), adjustments).tolist() == drawn
    np.testing.assert_array_equal(given_logits.numpy(), np.stack(logits))  # they are the model's, and stay as they are
    if adjustments is not None:
        penalties.apply(given_logits, adjustments)
    np.testing.assert_array_equal(given_logits.numpy(), np.stack(expected))


def test_penalties_agree_with_other_implementations():
    logits = np.array([2.0, -2.0, 1.0, 0.5], np.float32)
    prompt, output = np.array([0, 1]), np.array([2, 2, 1])
    both = SamplingParams(0.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(logits, both, prompt, output).tolist() == [2.0, -2.75, 0.0, 0.5]  # the prompt does not count
    repetition = SamplingParams(0.0, repetition_penalty=2.0)
    assert adjusted(logits, repetition, prompt, output).tolist() == [1.0, -4.0, 0.5, 0.5]
    bias = SamplingParams(0.0, logit_bias=((3, 100.0), (0, -1.5)))
    assert adjusted(logits, bias, prompt, output).tolist() == [0.5, -2.0, 1.0, 100.5]


def test_a_session_that_asks_for_nothing_has_no_tally():
    assert (
        penalties.gather(
            [
                (
                    0,
                    PenaltyCounts(SamplingParams(presence_penalty=1), np.array([1]), 1),
                    repetitive_slice(np.random.default_rng(0), 0),
                )
            ],
            CPU,
        )
        is None
    )  # nothing has occurred yet


# --- in the engine ---

PARAMS = {
    "repetition": SamplingParams(0.0, repetition_penalty=1.4),
    "frequency": SamplingParams(0.8, seed=3, frequency_penalty=1.5),
    "all": SamplingParams(
        1.0, seed=5, top_p=0.9, presence_penalty=1.0, frequency_penalty=-0.5, repetition_penalty=1.2,
        logit_bias=((7, 4.0), (9, -100.0), (200, 3.0)),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"), seed=3)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.mark.parametrize("name", PARAMS)
def test_text_is_that_of_the_oracle_on_the_same_model(folder, model, name):
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def next_logits(path):
        with torch.inference_mode():
            return module(torch.tensor([path])).logits[0, -1].numpy()

    prompt = [5, 6, 7, 5]
    plain = run(engine_of(model), [opening(1, prompt, PARAMS[name], max_tokens=30)])
    assert plain.new[1] == decode(next_logits, prompt, PARAMS[name], 30)
    off = SamplingParams(PARAMS[name].temperature, top_p=PARAMS[name].top_p, seed=PARAMS[name].seed)
    assert plain.new[1] != decode(next_logits, prompt, off, 30)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("batch", [1, 8])
def test_proposals_never_change_the_text(model, name, batch):
    params = PARAMS[name]
    prompts = [[5, 6, 7, 5], [9] * 10, [20, 21, 22, 20], [200], [8, 7, 8, 7], [4, 310, 4], [99, 98], [30, 31]][:batch]
    requests = [opening(i, prompt, params, max_tokens=40) for i, prompt in enumerate(prompts)]
    plain = run(engine_of(model), requests)
    alone = run(engine_of(model), [requests[-1]])
    assert alone.new[batch - 1] == plain.new[batch - 1]
    right = {i: [*prompt, *plain.new[i]] for i, prompt in enumerate(prompts)}
    rng = np.random.default_rng(0)

    def perfect(session_id, path):
        return [chain(session_id, path, right[session_id][len(path) : len(path) + 5])]

    def garbage(session_id, path):
        return [*perfect(session_id, path), random_tree(rng, session_id, path, VOCAB, 6)]

    for proposals in (perfect, garbage):
        speculative = run(engine_of(model), requests, proposals)
        assert speculative.new == plain.new
        assert speculative.accepted > 15 * batch


def test_a_reopened_session_counts_its_committed_tokens(model):
    params = PARAMS["all"]
    whole = run(engine_of(model), [opening(1, [5, 6, 7], params, max_tokens=40)]).new[1]
    for cut in (1, 20, 39):
        rest = run(engine_of(model), [opening(1, [5, 6, 7], params, max_tokens=40, committed=whole[:cut])])
        assert whole[:cut] + rest.new[1] == whole
