"""Grammars: masks are those of every node's own path, text always satisfies them, and drafts never change it."""

import json
import re
import threading
from functools import partial

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from outrider.errors import InvalidRequest
from outrider.serving.messages import MAX_GRAMMAR_LENGTH, Grammar, GrammarKind
from outrider.speculation.acceptance import decode
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.grammar import matcher as grammar_module
from services.target.grammar.matcher import Grammars, Matcher
from services.target.sampling import masks
from tests.support.target.driving import GREEDY, chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import EOS, VOCAB, write_model, write_tokenizer

CPU = torch.device("cpu")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-f]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "reed", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, "(ab|ac|b[xyz]{2,4})+d{3}[0-9]{2,30}")
LARK = Grammar(GrammarKind.EBNF, 'start: item ("," item)*\nitem: "(" start ")" | /[0-9]{1,3}/')
GBNF = Grammar(GrammarKind.EBNF, 'root ::= ("yes" | "no" | "yea") " " [a-c]+ "."')
SAMPLED = SamplingParams(1.0, seed=11, top_k=40)
PENALISED = SamplingParams(0.9, seed=5, frequency_penalty=1.5, repetition_penalty=1.3, logit_bias=((EOS, 2.0),))


@pytest.fixture(scope="module")
def automaton(folder):
    """A fresh automaton of a grammar, made by llguidance alone."""
    vocabulary = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=VOCAB, eos_token=[EOS])
    makers = {
        GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
        GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    }

    def make(grammar):
        text = (
            grammar_from("ebnf", grammar.text)
            if grammar.kind == GrammarKind.EBNF
            else makers[grammar.kind](grammar.text)
        )
        return LLMatcher(vocabulary, text)

    return make


def allowed_after(automaton, grammar, path):
    """Which tokens may follow, [VOCAB] bool."""
    state = automaton(grammar)
    assert state.consume_tokens(path)
    return np.unpackbits(np.frombuffer(state.compute_bitmask(), np.uint8), bitorder="little")[:VOCAB].astype(bool)


def valid_tree(rng, automaton, grammar, size):
    """A random tree of tokens that the grammar allows; and its paths."""
    tokens, parents, depths, paths = [], [], [], [[]]
    while len(tokens) < size:
        parent = int(rng.integers(-1, len(tokens))) if tokens else -1
        options = [t for t in np.flatnonzero(allowed_after(automaton, grammar, paths[parent + 1])).tolist() if t != EOS]
        path = [*paths[parent + 1], int(rng.choice(options))] if options else None
        if path is None or path in paths:
            size -= 1
            continue
        tokens.append(path[-1])
        parents.append(parent)
        depths.append(len(path))
        paths.append(path)
    return TreeSlice(
        np.array(tokens, np.uint32),
        np.array(parents, np.int32),
        np.array(depths, np.int32),
        np.zeros(len(tokens), np.float32),
    ), paths


@pytest.mark.parametrize("grammar", [JSON, REGEX, LARK, GBNF], ids=["json", "regex", "lark", "gbnf"])
def test_masks_of_trees_are_those_of_each_path(automaton, grammar):
    rng = np.random.default_rng(0)
    filler = masks.Masks(VOCAB, CPU)
    for _ in range(4):
        guided, expected, first = [], [], 0
        for size in rng.integers(0, 9, 3):
            draft, paths = valid_tree(rng, automaton, grammar, int(size))
            guided.append(
                masks.GrammarRows(first, Matcher(automaton(grammar), grammar, []), draft, [[]] * (len(draft) + 1))
            )
            expected += [allowed_after(automaton, grammar, path) for path in paths]
            first += len(draft) + 3  # rows of other sessions in between
        mask = filler.fill(guided)
        logits = torch.zeros(first, VOCAB)
        masks.apply(logits, mask)
        bound = [one.first + row for one in guided for row in range(len(one.draft) + 1)]
        np.testing.assert_array_equal(logits[bound].isfinite().numpy(), np.stack(expected))
        others = [row for row in range(first) if row not in bound]
        assert not logits[others].any()


def test_banned_tokens_are_masked_while_others_are_allowed(automaton):
    grammar = Grammar(GrammarKind.REGEX, "a|ab")
    filler = masks.Masks(VOCAB, CPU)
    a, b = (automaton(grammar).try_consume_tokens([t]) for t in (0, 1))
    assert a == b == 0
    letter = int(np.flatnonzero(allowed_after(automaton, grammar, []))[0])
    after = np.flatnonzero(allowed_after(automaton, grammar, [letter])).tolist()
    other = next(t for t in after if t != EOS)

    def may(path, banned):
        matcher = Matcher(automaton(grammar), grammar, path)
        mask = filler.fill([masks.GrammarRows(0, matcher, EMPTY_SLICE, [banned])])
        logits = torch.zeros(1, VOCAB)
        masks.apply(logits, mask)
        return np.flatnonzero(logits[0].isfinite()).tolist()

    assert may([letter], []) == sorted([EOS, other])
    assert may([letter], [EOS, 77]) == [other]
    assert may([letter, other], [EOS]) == [EOS]


# --- in the engine ---


def checks(grammar, text):
    """True if a text matches its grammar, without llguidance."""
    if grammar is JSON:
        value = json.loads(text)
        return (
            set(value) == {"name", "age", "kind", "tags"}
            and re.fullmatch("[a-f]{1,8}", value["name"])
            and 0 <= value["age"] <= 999
            and value["kind"] in ("red", "reed", "green")
            and len(value["tags"]) <= 3
        )
    if grammar is REGEX:
        return re.fullmatch(grammar.text, text)
    if grammar is GBNF:
        return re.fullmatch(r"(yes|no|yea) [abc]+\.", text)
    flat = text
    while (shorter := re.sub(r"\(\d{1,3}(,\d{1,3})*\)", "1", flat)) != flat:
        flat = shorter
    return re.fullmatch(r"\d{1,3}(,\d{1,3})*", flat)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("grammar", [JSON, REGEX, LARK, GBNF], ids=["json", "regex", "lark", "gbnf"])
def test_text_is_that_of_the_oracle_and_satisfies_the_grammar(folder, model, tokenizer, automaton, grammar, params):
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def next_logits(path):
        with torch.inference_mode():
            return module(torch.tensor([path])).logits[0, -1].numpy()

    prompt = [5, 6, 7]
    plain = run(engine_of(model), [opening(1, prompt, params, max_tokens=150, grammar=grammar)])
    tokens = plain.new[1]
    allowed = partial(allowed_after, automaton, grammar)
    assert tokens == decode(next_logits, prompt, params, len(tokens), allowed)
    if plain.reasons[1] is FinishReason.STOP:
        assert tokens[-1] == EOS
        assert checks(grammar, tokenizer.decode(tokens[:-1]))
    else:  # longer than there was room for
        assert len(tokens) == 150
        assert grammar is not JSON


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
def test_proposals_never_change_the_text(model, automaton, params, batch):
    grammars = [JSON, REGEX, None, LARK, GBNF, JSON, None, REGEX][:batch]
    requests = [
        opening(i, [5 + i, 6, 7], params, max_tokens=60, grammar=grammar, ignore_eos=grammar is None)
        for i, grammar in enumerate(grammars)
    ]
    plain = run(engine_of(model), requests)
    right = {r.session_id: [*r.tokens.tolist(), *plain.new[r.session_id]] for r in requests}
    rng = np.random.default_rng(0)

    def perfect(session_id, path):
        return [chain(session_id, path, right[session_id][len(path) : len(path) + 6])]

    def beside(session_id, path):
        """The right nodes, valid ones beside them, and garbage."""
        grammar = grammars[session_id]
        proposals = [*perfect(session_id, path), random_tree(rng, session_id, path, VOCAB, 6)]
        if grammar is not None:
            after = path[3:]
            options = np.flatnonzero(allowed_after(automaton, grammar, after))
            proposals += [chain(session_id, path, [token], -0.2) for token in options[:3].tolist()]
        return proposals

    for drafts in (perfect, beside):
        speculative = run(engine_of(model), requests, drafts)
        assert speculative.new == plain.new
        assert speculative.reasons == plain.reasons
        assert speculative.accepted > 8 * batch
        assert sum(map(len, speculative.commits.values())) < sum(map(len, plain.commits.values()))


BRACKETS = 'start: e\ne: "(" e ")" | "[" e "]" | "<" e ">" | /[0-9]{1,3}/ | e "+" e'
BOUNDED = 'start: think "!" answer\nthink[max_tokens=6]: /[a-z]+/\nanswer: /[0-9]{3}/'


def test_rejected_proposals_leave_no_trace_in_nested_grammars(model, tokenizer):
    """What closes a bracket depends on the path; a drafted one of another kind must not be remembered."""
    ids = {char: tokenizer.encode(char).ids[0] for char in "([<0123456789"}
    grammar, bias = Grammar(GrammarKind.EBNF, BRACKETS), tuple((ids[char], 4.0) for char in "([<")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        request = opening(1, [5, 6, 7], SamplingParams(1.0, seed=seed, logit_bias=bias), max_tokens=40, grammar=grammar)
        plain = run(engine_of(model), [request])

        def drafts(session_id, path, rng=rng, right=plain.new[1]):
            wrong = [ids[rng.choice(list("([<"))], ids[rng.choice(list("0123456789"))]]
            few = right[len(path) - 3 :][: rng.integers(0, 3)]
            return [chain(session_id, path, nodes, score) for nodes, score in ((wrong, -0.01), (few, -0.5)) if nodes]

        found = run(engine_of(model), [request], drafts)
        assert (found.new, found.reasons) == (plain.new, plain.reasons)


def test_grammars_without_rollback_verify_proposals(model):
    request = opening(1, [5, 6, 7], SAMPLED, max_tokens=40, grammar=Grammar(GrammarKind.EBNF, BOUNDED))
    plain = run(engine_of(model), [request])
    assert plain.new[1]

    def drafts(session_id, path):
        return [chain(session_id, path, plain.new[1][len(path) - 3 :][:4])]

    found = run(engine_of(model), [request], drafts)
    assert (found.new, found.reasons) == (plain.new, plain.reasons)
    assert found.accepted > 0


def test_forbidden_nodes_are_not_verified(model, tokenizer):
    a, b = tokenizer.encode("ab").ids
    requests = [opening(1, [5], max_tokens=40, grammar=Grammar(GrammarKind.REGEX, "a{20}"))]

    def drafts(session_id, path):
        return [
            chain(session_id, path, [b, a], 0.0),
            chain(session_id, path, [EOS, a]),
            chain(session_id, path, [a, b, a], -1),
        ]

    result = run(engine_of(model), requests, drafts)
    assert result.new[1] == [a] * 20 + [EOS]
    assert result.verified == result.accepted == 10  # of each proposal the one allowed node
    assert len(result.commits[1]) == 11


def test_a_session_opened_again_goes_on_where_its_text_stood(model):
    whole = run(engine_of(model), [opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON)]).new[1]
    for cut in (1, 12, len(whole) - 1):
        again = opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON, committed=whole[:cut])
        assert whole[:cut] + run(engine_of(model), [again]).new[1] == whole
    wrong = opening(1, [5, 6, 7], SAMPLED, max_tokens=90, grammar=JSON, committed=[9, 9])
    assert failure_of(engine_of(model), wrong).param == "json_schema"


def test_min_tokens_holds_as_long_as_the_grammar_goes_on(model, tokenizer):
    def text(pattern, **stop):
        grammar = Grammar(GrammarKind.REGEX, pattern)
        tokens = run(engine_of(model), [opening(1, [5], max_tokens=30, grammar=grammar, **stop)]).new[1]
        assert tokens[-1] == EOS
        return tokenizer.decode(tokens[:-1])

    assert len(text("[ab]{1,20}", min_tokens=15)) >= 15
    assert len(text("[ab]{3}", min_tokens=15)) == 3


# --- grammars that are wrong, slow, or too much ---


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
