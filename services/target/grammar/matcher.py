"""Grammars: which tokens may follow a session's text, told by llguidance, state by state.

    compile   a grammar becomes an automaton once, in a thread of its own, however many sessions ask for it
    match     a session has a matcher of its own, which its committed tokens move along
    mask      what may follow, also after each draft node; see sampling/masks.py

A session with a grammar ends with one of the model's end-of-sequence tokens as soon as nothing else may follow, and may
end with one wherever its text is complete.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import GrammarFormat, LLMatcher, LLTokenizer, grammar_from

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.tree import TreeSlice
from services.target.grammar.closed_objects import closed
from services.target.grammar.gbnf import readable
from services.target.grammar.string_formats import understood

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

_CACHED = 64  # compiled grammars that are kept
_ERROR_LENGTH = 500  # characters of llguidance's own words
_FORMATS: dict[GrammarKind, GrammarFormat] = {GrammarKind.REGEX: "regex", GrammarKind.EBNF: "ebnf"}
# Where it is not plain that alternatives exclude one another, as it is not of two numbers, one at least must fit, as
# xgrammar has it, too; else llguidance refuses them.
_ONE_OF: JsonCompileOptions = {"coerce_one_of": True}
# Between the parts of JSON, unless a schema has a word of its own on it. Without an end to it, a small model may go on
# with blanks until its tokens are spent; this much holds a line's end and the indentation of any sane nesting.
_BLANKS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


class Matcher:
    """Where the text of one session stands in its grammar."""

    def __init__(self, start: LLMatcher, grammar: Grammar, tokens: Sequence[int]) -> None:
        """tokens: committed behind the prompt. Raises InvalidRequest if the grammar forbids them."""
        self._state = start.deep_copy()
        self.grammar = grammar
        self.fault: InvalidRequest | None = None
        self.commit(tokens)
        if self.fault is not None:
            raise self.fault

    def admits(self, path: Sequence[int]) -> bool:
        """True if these tokens may follow."""
        return bool(self._state.validate_tokens(list(path)) == len(path))

    def commit(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that may follow. Not by one that ends the session."""
        if not self._state.consume_tokens(list(tokens)):
            self.fail(self._state)

    def along(self, draft: TreeSlice) -> list[LLMatcher]:
        """The automaton at the root, which is the session's own and must be left as it is, and after each node."""
        states = [self._state]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            state = states[parent + 1].deep_copy()
            state.consume_tokens([token])
            states.append(state)
        return states

    def fail(self, state: LLMatcher) -> None:
        """Note that the session cannot go on: the automaton has met one of its limits."""
        why = f"the grammar cannot be followed: {_words(state.get_error())}"
        self.fault = InvalidRequest(why, param=self.grammar.kind.param)


class Grammars:
    """Compiles grammars for one model, and keeps those that were used last."""

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_file: tokenizer.json of the model's folder, if it has one."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[int, tuple[Grammar, Future[LLMatcher]]] = {}  # by session id
        self._alone: set[int] = set()  # sessions whose automaton is no copy
        self._thread = ThreadPoolExecutor(1, "grammar")

    def check(self) -> None:
        """Raise InvalidRequest if this model cannot follow grammars."""
        if self._tokenizer_file is None:
            raise InvalidRequest("this model's folder has no tokenizer.json, so it cannot follow a grammar")
        if not self._eos:
            raise InvalidRequest("this model has no end-of-sequence token, so it cannot follow a grammar")

    def load(self) -> None:
        """Read the tokenizer now, if grammars can be followed at all, rather than with the first one."""
        if self._tokenizer_file is not None and self._eos:
            self._thread.submit(lambda: self._tokenizer)

    def request(self, session_id: int, grammar: Grammar) -> None:
        """Compile a grammar for a session, which `ready` will name. `check` must have passed."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._waiting[session_id] = grammar, future

    def renew(self, session_id: int, grammar: Grammar) -> bool:
        """Compile a grammar anew for a session that met a limit, and for the next ones. False if that is in vain.

        Copies share a lexer, which learns with every text, up to a limit: it may have been met by what others wrote.
        """
        self._compiled.pop(grammar, None)
        if session_id in self._alone:
            return False
        self._alone.add(session_id)
        self._waiting[session_id] = grammar, self._thread.submit(self._compile, grammar)
        return True

    def forget(self, session_id: int) -> None:
        """A session has ended."""
        self._waiting.pop(session_id, None)
        self._alone.discard(session_id)

    def wait(self, seconds: float) -> None:
        """Wait until a grammar is ready, if one is to come, but not longer."""
        wait([future for _, future in self._waiting.values()], seconds, FIRST_COMPLETED)

    def ready(self) -> Iterator[tuple[int, Grammar, LLMatcher | InvalidRequest]]:
        """Sessions whose grammars are ready since the last call, or what is wrong with these."""
        for session_id, (grammar, future) in list(self._waiting.items()):
            if future.done():
                del self._waiting[session_id]
                error = future.exception()
                assert error is None or isinstance(error, InvalidRequest), error
                yield session_id, grammar, future.result() if error is None else error

    # --- in the thread ---

    @cached_property
    def _tokenizer(self) -> LLTokenizer | str:
        """The tokenizer, or why there is none."""
        assert self._tokenizer_file is not None, "checked when a session opened"
        try:
            return LLTokenizer(self._tokenizer_file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # whatever a tokenizer's file may hold
            log.warning("%s cannot be used for grammars, which are refused: %s", self._tokenizer_file, error)
            return f"this model's tokenizer cannot be used for grammars: {error}"

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if isinstance(self._tokenizer, str):
            raise InvalidRequest(self._tokenizer)
        try:
            start = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
            error = start.get_error()
        except (ValueError, RecursionError) as raised:
            error = str(raised)
        except BaseException as raised:  # a panic of the library is no Exception, and must end this session alone
            log.exception("a grammar met a bug of the library that compiles it")
            error = str(raised) or type(raised).__name__
        if error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_words(error)}", param=grammar.kind.param)
        return start


def _words(error: str) -> str:
    """llguidance's own words, without the state of its parser."""
    return error.partition("<state>")[0].strip()[:_ERROR_LENGTH]


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's own form. Raises ValueError."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        text = readable(grammar.text) if grammar.kind is GrammarKind.EBNF else grammar.text
        return grammar_from(_FORMATS[grammar.kind], text)
    schema = json.loads(grammar.text)
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    own = isinstance(guidance, dict) and not _BLANKS.keys().isdisjoint(guidance)
    defaults = _ONE_OF if own else _ONE_OF | _BLANKS
    return LLMatcher.grammar_from_json_schema(json.dumps(understood(closed(schema))), defaults=defaults)
