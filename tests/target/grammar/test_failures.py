"""Grammars that are wrong, slow or too large: they end their own session at most."""

import json
import threading
from functools import partial

import pytest
from llguidance import LLMatcher, LLParserLimits

from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.grammar import matcher as grammar_module
from services.target.grammar.matcher import Grammars
from tests.support.grammars import JSON, REGEX, SAMPLED
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import write_model, write_tokenizer


def test_a_session_opened_again_goes_on_where_its_text_stood(model):
    whole = run(engine_of(model), [opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON)]).new[1]
    for cut in (1, 12, len(whole) - 1):
        again = opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON, committed=whole[:cut])
        assert whole[:cut] + run(engine_of(model), [again]).new[1] == whole
    wrong = opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON, committed=[9, 9])
    assert failure_of(engine_of(model), wrong).param == "json_schema"


def failure_of(engine, request):
    """The error that ends a session before it begins."""
    engine.open(request)
    for _ in range(500):
        if failures := engine.step().failures:
            assert engine.idle
            engine.check()
            assert [failure.session_id for failure in failures] == [request.session_id]
            assert isinstance(failures[0].error, InvalidRequest)
            return failures[0].error
    raise AssertionError("the session goes on")


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "thing"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}'),
        Grammar(GrammarKind.EBNF, "start: other"),
        Grammar(GrammarKind.EBNF, "root ::= (("),
    ],
)
def test_a_wrong_grammar_ends_its_session_alone(model, grammar):
    engine = engine_of(model)
    engine.open(opening(2, [5, 6], max_tokens=3))
    engine.open(opening(1, [5], grammar=grammar))
    failures, commits = [], []
    for _ in range(300):
        if engine.idle:
            break
        output = engine.step()
        failures += output.failures
        commits += output.commits
    assert {commit.session_id for commit in commits} == {2}
    (failure,) = failures
    assert (failure.session_id, failure.error.param) == (1, grammar.kind.param)
    assert "compiled" in failure.error.message
    assert "<state>" not in failure.error.message


def test_models_that_cannot_follow_grammars_refuse_them_at_once(tmp_path):
    bare = engine_of(load_model(write_model(tmp_path / "bare")))
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        bare.open(opening(1, [5], grammar=JSON))
    assert bare.idle
    folder = write_tokenizer(write_model(tmp_path / "endless", eos_token_id=None))
    for name, key in (("generation_config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in settings.items() if k != key}))
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        engine_of(load_model(folder)).open(opening(1, [5], grammar=JSON))
    with pytest.raises(InvalidRequest):
        Grammar(GrammarKind.REGEX, "a" * (MAX_GRAMMAR_LENGTH + 1))


def test_a_tokenizer_that_cannot_be_used_refuses_grammars_only(tmp_path):
    folder = write_model(tmp_path)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    engine = engine_of(load_model(folder))
    assert "tokenizer" in failure_of(engine, opening(1, [5], grammar=JSON)).message
    assert len(run(engine, [opening(2, [5], max_tokens=4)]).new[2]) == 4


def test_a_slow_grammar_delays_no_other_session_and_is_compiled_once(model, monkeypatch):
    go, compiled = threading.Event(), []
    compile_now = Grammars._compile

    def slowly(self, grammar, wanted):
        compiled.append(grammar)
        assert go.wait(20)
        return compile_now(self, grammar, wanted)

    monkeypatch.setattr(Grammars, "_compile", slowly)
    engine = engine_of(model)
    for session_id in (1, 2, 3):
        engine.open(opening(session_id, [5, session_id], max_tokens=150, grammar=JSON))
    engine.open(opening(4, [5, 6], max_tokens=5))
    engine.receive([chain(1, [5, 1], [9, 9])], ())  # drafts may come before the grammar is there
    done = [commit for _ in range(5) for commit in engine.step().commits]
    assert {commit.session_id for commit in done} == {4}
    assert done[-1].finish_reason is FinishReason.LENGTH
    engine.close(3)
    assert not engine.idle
    go.set()
    ended = {}
    while not engine.idle:
        for commit in engine.step().commits:
            ended[commit.session_id] = commit.finish_reason
        engine.check()
    assert ended == {1: FinishReason.STOP, 2: FinishReason.STOP}
    assert compiled == [JSON]


def test_a_grammar_that_the_library_panics_at_ends_its_session_alone(model, monkeypatch):
    class Panic(BaseException):
        """As Rust's panics come to Python."""

    def panic(*_, **__):
        raise Panic("index out of bounds")

    monkeypatch.setattr(grammar_module, "LLMatcher", panic)
    engine = engine_of(model)
    assert "index out of bounds" in failure_of(engine, opening(1, [5], grammar=REGEX)).message
    assert len(run(engine, [opening(2, [5], max_tokens=4)]).new[2]) == 4


def test_a_grammar_that_meets_a_limit_midway_ends_its_session_alone(model, monkeypatch):
    # The number of ways to read the text grows with it.
    ambiguous = Grammar(GrammarKind.EBNF, 'start: e\ne: e e | "a"')
    limits = LLParserLimits(step_max_items=80)
    monkeypatch.setattr(grammar_module, "LLMatcher", partial(LLMatcher, limits=limits))
    engine = engine_of(model)
    engine.open(opening(1, [5], max_tokens=200, min_tokens=100, grammar=ambiguous))
    engine.open(opening(2, [5, 6], max_tokens=20))
    failures, lengths = [], {1: 0, 2: 0}
    while not engine.idle:
        output = engine.step()
        failures += output.failures
        for commit in output.commits:
            lengths[commit.session_id] += len(commit.tokens)
    (failure,) = failures
    assert failure.session_id == 1
    assert isinstance(failure.error, InvalidRequest)
    assert "limit" in failure.error.message
    assert 2 < lengths[1] < 100
    assert lengths[2] == 20
    engine.check()


@pytest.mark.parametrize("at_once", [False, True])
def test_no_session_exceeds_a_limit_because_of_other_sessions(model, monkeypatch, at_once):
    """Copies of an automaton share a lexer, whose states add up over all texts."""
    grammar = Grammar(GrammarKind.REGEX, r"(.*[a-m].{0,40}){1,8}")
    monkeypatch.setattr(grammar_module, "LLMatcher", partial(LLMatcher, limits=LLParserLimits(max_lexer_states=400)))
    renewed, renew = [], Grammars.renew
    monkeypatch.setattr(Grammars, "renew", lambda self, *what: renewed.append(what) or renew(self, *what))
    requests = [
        opening(seed, [5, seed], SamplingParams(1.0, seed=seed), max_tokens=20, min_tokens=19, grammar=grammar)
        for seed in range(1, 20)
    ]
    alone = {request.session_id: run(engine_of(model), [request]).new[request.session_id] for request in requests}
    assert not renewed, "each text leads to few states"
    engine, found = engine_of(model, max_queued_requests=0, max_running_requests=len(requests)), {}
    for some in [requests] if at_once else [[request] for request in requests]:
        found |= run(engine, some).new
    assert found == alone
    assert renewed, "all of them lead to many"
    assert not engine.sessions.grammars._alone
