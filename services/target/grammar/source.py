"""Grammars in llguidance's own format, and the messages of those that have none."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from llguidance import GrammarFormat, LLMatcher, grammar_from

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from services.target.grammar.closed_objects import closed
from services.target.grammar.gbnf import readable
from services.target.grammar.numbers import checked
from services.target.grammar.string_formats import understood

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

_ERROR_LENGTH = 500  # most characters of llguidance's messages
_FORMATS: dict[GrammarKind, GrammarFormat] = {GrammarKind.REGEX: "regex", GrammarKind.EBNF: "ebnf"}
# Treat oneOf as anyOf if the alternatives may overlap, as xgrammar does; otherwise llguidance rejects the schema.
_ONE_OF: JsonCompileOptions = {"coerce_one_of": True}
# Whitespace between the parts of JSON, unless the schema sets its own. Without a limit, a small model may generate
# whitespace until max_tokens; 64 characters hold a line break and the indentation of deep nesting.
_BLANKS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


def source_of(grammar: Grammar) -> str:
    """A grammar in llguidance's format. Raises InvalidRequest."""
    try:
        return _source(grammar)
    except RecursionError:
        raise refusal(grammar, "it is nested too deep") from None
    except Exception as error:  # llguidance's translation of GBNF raises plain exceptions
        raise refusal(grammar, str(error)) from None


def refusal(grammar: Grammar, why: str) -> InvalidRequest:
    """The error for a grammar that cannot be compiled."""
    return InvalidRequest(f"the grammar cannot be compiled: {in_words(why)}", param=grammar.kind.param)


def in_words(error: str) -> str:
    """llguidance's message, without the state of its parser."""
    return error.partition("<state>")[0].strip()[:_ERROR_LENGTH]


def _source(grammar: Grammar) -> str:
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        text = readable(grammar.text) if grammar.kind is GrammarKind.EBNF else grammar.text
        return grammar_from(_FORMATS[grammar.kind], text)
    schema = json.loads(grammar.text)
    if schema is False:
        raise ValueError("no text satisfies the schema `false`")
    schema = {} if schema is True else schema
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    own = isinstance(guidance, dict) and not _BLANKS.keys().isdisjoint(guidance)
    defaults = _ONE_OF if own else _ONE_OF | _BLANKS
    return LLMatcher.grammar_from_json_schema(json.dumps(understood(closed(checked(schema)))), defaults=defaults)
