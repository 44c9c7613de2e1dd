"""Grammars: masks are those of every node's own path, text always satisfies them, and drafts never change it."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer, grammar_from

from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.acceptance import decode
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.grammar.matcher import Matcher
from services.target.sampling import masks
from tests.support.grammars import JSON, REGEX, SAMPLED
from tests.support.target.driving import GREEDY, chain, engine_of, opening, random_tree, run
from tests.support.tiny import EOS, VOCAB

CPU = torch.device("cpu")


LARK = Grammar(GrammarKind.EBNF, 'start: item ("," item)*\nitem: "(" start ")" | /[0-9]{1,3}/')
GBNF = Grammar(GrammarKind.EBNF, 'root ::= ("yes" | "no" | "yea") " " [a-c]+ "."')


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


def test_min_tokens_holds_as_long_as_the_grammar_goes_on(model, tokenizer):
    def text(pattern, **stop):
        grammar = Grammar(GrammarKind.REGEX, pattern)
        tokens = run(engine_of(model), [opening(1, [5], max_tokens=30, grammar=grammar, **stop)]).new[1]
        assert tokens[-1] == EOS
        return tokenizer.decode(tokens[:-1])

    assert len(text("[ab]{1,20}", min_tokens=15)) >= 15
    assert len(text("[ab]{3}", min_tokens=15)) == 3
