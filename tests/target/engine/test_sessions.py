"""The ends of sessions in the target's engine, sessions that are refused, and faults that end one alone."""

import pytest
import torch

from outrider.errors import InvalidRequest
from outrider.serving.messages import StepOutput
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from tests.support.target.driving import chain, engine_of, load_model, opening, prompts, requests_of, run
from tests.support.tiny import VOCAB, write_model


def test_context_length_ends_a_session(model):
    engine = engine_of(model, page_size=8, max_total_tokens=40)
    assert engine.sessions.longest == 40
    result = run(engine, requests_of([list(range(3, 33))], max_tokens=100))
    assert len(result.new[1]) == 10
    assert result.reasons[1] == FinishReason.LENGTH


def stopping_token(plain):
    """A token that first occurs in the middle of a text, and its index."""
    return next((token, i) for i, token in enumerate(plain) if i >= 4 and token not in plain[:i])


def test_stop_tokens_end_within_an_accepted_path(model):
    text = prompts(1)[0]
    plain = run(engine_of(model), requests_of([text])).new[1]
    token, place = stopping_token(plain)
    request = opening(1, text, stop_token_ids=(token,))
    for proposals in (None, lambda i, path: [chain(i, path, plain[len(path) - len(text) :][:12])]):
        result = run(engine_of(model, speculative_num_draft_tokens=16), [request], proposals)
        assert result.new[1] == plain[: place + 1]
        assert result.reasons[1] == FinishReason.STOP
        assert result.accepted == (0 if proposals is None else place + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_mask_stop_tokens_at_every_position(model, temperature):
    text = prompts(1)[0]
    params = SamplingParams(temperature, seed=2)
    free = run(engine_of(model), requests_of([text], params)).new[1]
    token, place = stopping_token(free)
    request = opening(1, text, params, stop_token_ids=(token,), min_tokens=place + 3)
    plain = run(engine_of(model), [request])
    assert plain.new[1][:place] == free[:place]
    assert token not in plain.new[1][: place + 3]
    assert plain.new[1][place] != token
    drafted = run(engine_of(model), [request], lambda i, path: [chain(i, path, free[len(path) - len(text) :][:8])])
    assert drafted.new == plain.new
    assert drafted.accepted > 0
    # Where the token is allowed, it also ends the session within an accepted path.
    allowed = opening(1, text, params, stop_token_ids=(token,), min_tokens=place)
    engine = engine_of(model, speculative_num_draft_tokens=24)
    ended = run(engine, [allowed], lambda i, path: [chain(i, path, free[len(path) - len(text) :])])
    assert ended.new[1] == free[: place + 1]
    assert ended.steps == 1


def test_the_models_own_end_of_sequence_counts_unless_ignored(model):
    assert model.eos_token_ids == (1,)
    ends = set()
    for seed in range(40):
        request = opening(1, [5, 6, 7], SamplingParams(3.0, seed=seed), max_tokens=60, ignore_eos=False)
        result = run(engine_of(model), [request])
        assert (1 in result.new[1]) == (result.reasons[1] == FinishReason.STOP)
        assert 1 not in result.new[1][:-1]
        ends.add(result.reasons[1])
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


def test_a_reopened_session_goes_on_where_it_was(model):
    params = SamplingParams(0.9, seed=77)
    text = prompts(1)[0]
    whole = run(engine_of(model), requests_of([text], params)).new[1]
    for done in (1, 10, 23):
        again = opening(1, text, params, committed=whole[:done])
        assert run(engine_of(model), [again]).new[1] == whole[done:]


def test_an_open_id_is_replaced(model):
    engine = engine_of(model)
    engine.open(opening(1, [5, 6, 7]))
    engine.step()
    assert run(engine, [opening(1, [9, 8])]).new[1] == run(engine_of(model), [opening(1, [9, 8])]).new[1]


@pytest.mark.parametrize(("request_", "words"), [
    (opening(1, []), "empty"),
    (opening(1, [3, VOCAB]), "vocabulary"),
    (opening(1, [3] * 512), "context"),
    (opening(1, [3], stop_token_ids=(VOCAB,)), "stop token"),
    (opening(1, [3], max_tokens=2, committed=[4, 5]), "max_tokens already"),
])  # fmt: skip
def test_bad_opens_are_refused(model, request_, words):
    engine = engine_of(model)
    with pytest.raises(InvalidRequest, match=words):
        engine.open(request_)
    assert engine.idle
    engine.check()


def test_no_wait_for_proposals_of_a_session_that_has_ended(model):
    """Also where each step waits for its drafter."""
    engine = engine_of(model, speculative_always=True)
    for number in (1, 2):
        engine.open(opening(number, [3, 4, 5], max_tokens=2))
        assert engine.draft_wait == 0
        (first,) = engine.step().commits
        assert first.draft_budget
        assert engine.draft_wait > 5  # seconds, for the answer to this commit
        (last,) = engine.step().commits
        assert last.finish_reason == FinishReason.LENGTH
        assert engine.draft_wait == 0


def test_proposals_for_unknown_sessions_are_ignored(model):
    engine = engine_of(model)
    engine.receive([chain(5, [1, 2], [3])], ())
    assert engine.idle
    assert engine.step().commits == StepOutput().commits == []


def test_broken_logits_end_one_session_and_no_other(tmp_path):
    model = load_model(write_model(tmp_path, tie_word_embeddings=False))
    table = torch.randn(VOCAB, 48)
    table[300] = float("nan")
    model.runner.update({"model.embed_tokens.weight": table})
    engine = engine_of(model)
    engine.open(opening(1, [5, 6, 7]))
    engine.open(opening(2, [5, 300, 7]))
    output = engine.step()
    assert [commit.session_id for commit in output.commits] == [1]
    assert [failure.session_id for failure in output.failures] == [2]
    assert "not finite" in output.failures[0].error.message
    engine.check()


@pytest.mark.parametrize("flags", [{}, {"dtype": "bfloat16"}, {"attention_backend": "torch_native"}], ids=str)
@pytest.mark.parametrize("nodes", [[300], [300, 5], [9, 300, 5]], ids=str)
def test_a_draft_token_with_logits_that_are_not_finite_ends_no_session(tmp_path, flags, nodes):
    model = load_model(write_model(tmp_path, tie_word_embeddings=False), **flags)
    table = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(0))
    table[300] = float("nan")
    model.runner.update({"model.embed_tokens.weight": table})
    requests = [opening(1, [5, 6, 7], max_tokens=12)]
    plain = run(engine_of(model), requests)
    drafted = run(engine_of(model), requests, lambda session_id, tokens: [chain(session_id, tokens, nodes)])
    assert drafted.new == plain.new
    assert drafted.verified > 0
