"""Grammars in GBNF, regular expressions and JSON schemas: compiled and followed, or InvalidRequest."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from services.target.grammar.matcher import Grammars, Matcher
from tests.fuzz.choices import Choices
from tests.support.tiny import EOS, VOCAB, write_tokenizer

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
_PIECES = ("root", " ::= ", "\n", '"a"', "[a-z]", "[^\\]]", "(", ")", "*", "+", "?", "{2,3}", "{0,2000}", " | ", "item",
           "start", "# c\n", '"\\u00e9"', '"\\x00"', "\\", '"', "[", ".", "é", "item-1", "item_1", "_")  # fmt: skip
_REGEXES = ("a", "[0-9]+", "(", ")", "|", "*", "{3}", "{1,100}", "\\d", "\\p{L}", "^", "$", ".", "(?i)", "(?=a)", "\\")


_SECONDS = 60.0  # for a grammar, on a busy machine
_GRAMMARS = Grammars(write_tokenizer(Path(_FOLDER.name)) / "tokenizer.json", VOCAB, [EOS])


def fuzz(data: bytes) -> None:
    """The first byte chooses the kind of grammar, and whether the rest is its text or decisions."""
    choices = Choices(data)
    kind = choices.one((GrammarKind.EBNF, GrammarKind.REGEX, GrammarKind.JSON_SCHEMA))
    if not choices.chance(2):
        text = choices.rest().decode("utf-8", "replace")
        if kind is GrammarKind.JSON_SCHEMA and not _is_json(text):
            return  # the gateway sends valid JSON alone
    elif kind is GrammarKind.JSON_SCHEMA:
        text = json.dumps(choices.schema())
    else:
        pieces = _PIECES if kind is GrammarKind.EBNF else _REGEXES
        text = "".join(choices.one(pieces) for _ in range(choices.below(48)))
        text = ("root ::= " if kind is GrammarKind.EBNF else "") + text
    grammar = Grammar(kind, text)
    _GRAMMARS.request(0, grammar)
    _GRAMMARS.wait(_SECONDS)
    ((_, _, start),) = _GRAMMARS.ready()
    if isinstance(start, InvalidRequest):
        return
    try:
        matcher = Matcher(start, grammar, [])
    except InvalidRequest:
        return
    for _ in range(8):
        token = choices.below(VOCAB)
        if not matcher.admits([token]):
            continue
        matcher.commit([token])
        if matcher.fault is not None:
            return


def seeds() -> list[bytes]:
    """One of each kind, as text and as decisions."""
    texts = ('root ::= "a" item*\nitem ::= [b-d]+ | (item "x")?', "[a-z]+(@|x)\\d{2}", '{"type": "object"}')
    return [bytes((kind, 0)) + text.encode() for kind, text in enumerate(texts)] + [
        bytes((kind, 1, *range(32))) for kind in range(3)
    ]


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict | bool)
    except (ValueError, RecursionError):
        return False
