"""Grammars: the tokens that may follow a session's text, computed by llguidance.

    compile   a grammar becomes an automaton once for all sessions, in a separate thread
    match     each session has a matcher, which its committed tokens advance
    mask      the allowed tokens, also after each draft node; see sampling/masks.py

A session with a grammar ends with one of the model's end-of-sequence tokens as soon as no other token is allowed, and
may end with one wherever its text is complete.
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
from services.target.grammar.numbers import checked
from services.target.grammar.string_formats import understood

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

log = logging.getLogger(__name__)

_CACHED = 64  # compiled grammars in the cache
_ERROR_LENGTH = 500  # most characters of llguidance's messages
_FORMATS: dict[GrammarKind, GrammarFormat] = {GrammarKind.REGEX: "regex", GrammarKind.EBNF: "ebnf"}
# Treat oneOf as anyOf if the alternatives may overlap, as xgrammar does; otherwise llguidance rejects the schema.
_ONE_OF: JsonCompileOptions = {"coerce_one_of": True}
# Whitespace between the parts of JSON, unless the schema sets its own. Without a limit, a small model may generate
# whitespace until max_tokens; 64 characters hold a line break and the indentation of deep nesting.
_BLANKS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}"}


class Matcher:
    """The state of one session's text in its grammar. fault: set once the session cannot continue."""

    def __init__(self, start: LLMatcher, grammar: Grammar, tokens: Sequence[int]) -> None:
        """tokens: committed after the prompt. Raises InvalidRequest if the grammar forbids them."""
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
        """Advance by allowed tokens, without one that ends the session."""
        if not self._state.consume_tokens(list(tokens)):
            self.fail(self._state)

    def along(self, draft: TreeSlice) -> list[LLMatcher]:
        """The automaton at the root, which must not be changed, and a copy after each node."""
        states = [self._state]
        for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            state = states[parent + 1].deep_copy()
            state.consume_tokens([token])
            states.append(state)
        return states

    def fail(self, state: LLMatcher) -> None:
        """Set the fault: the automaton has exceeded one of its limits."""
        why = f"the grammar cannot be followed: {_words(state.get_error())}"
        self.fault = InvalidRequest(why, param=self.grammar.kind.param)


class Grammars:
    """Compiles grammars for one model and caches those used last."""

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_file: tokenizer.json of the model's folder, if it has one."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._waiting: dict[int, tuple[Grammar, Future[LLMatcher]]] = {}  # by session id
        self._alone: set[int] = set()  # sessions with an automaton of their own
        self._thread = ThreadPoolExecutor(1, "grammar")

    def check(self) -> None:
        """Raise InvalidRequest if this model does not support grammars."""
        if self._tokenizer_file is None:
            raise InvalidRequest("this model's folder has no tokenizer.json, so it cannot follow a grammar")
        if not self._eos:
            raise InvalidRequest("this model has no end-of-sequence token, so it cannot follow a grammar")

    def load(self) -> None:
        """Read the tokenizer now, if the model supports grammars, instead of with the first grammar."""
        if self._tokenizer_file is not None and self._eos:
            self._thread.submit(lambda: self._tokenizer)

    def request(self, session_id: int, grammar: Grammar) -> None:
        """Compile a grammar for a session; `ready` reports when it is done. `check` must have passed."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            if len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        self._waiting[session_id] = grammar, future

    def renew(self, session_id: int, grammar: Grammar) -> bool:
        """Compile a grammar again for a session that exceeded a limit, and for later sessions.

        Copies share a lexer, whose state grows with every text up to a limit, which other sessions may have used up.
        Returns False if the session had an automaton of its own already, so that compiling again cannot help.
        """
        self._compiled.pop(grammar, None)
        if session_id in self._alone:
            return False
        self._alone.add(session_id)
        self._waiting[session_id] = grammar, self._thread.submit(self._compile, grammar)
        return True

    def forget(self, session_id: int) -> None:
        """Drop the state of a session that has ended."""
        self._waiting.pop(session_id, None)
        self._alone.discard(session_id)

    def wait(self, seconds: float) -> None:
        """Wait until a requested grammar is ready, at most `seconds`."""
        wait([future for _, future in self._waiting.values()], seconds, FIRST_COMPLETED)

    def ready(self) -> Iterator[tuple[int, Grammar, LLMatcher | InvalidRequest]]:
        """Sessions whose grammars were compiled since the last call, with the automaton or the error."""
        for session_id, (grammar, future) in list(self._waiting.items()):
            if future.done():
                del self._waiting[session_id]
                error = future.exception()
                assert error is None or isinstance(error, InvalidRequest), error
                yield session_id, grammar, future.result() if error is None else error

    # --- in the thread ---

    @cached_property
    def _tokenizer(self) -> LLTokenizer | str:
        """The tokenizer, or the reason why it cannot be used."""
        assert self._tokenizer_file is not None, "checked when a session opened"
        try:
            return LLTokenizer(self._tokenizer_file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # a tokenizer file may hold anything
            log.warning("%s cannot be used for grammars, which are rejected: %s", self._tokenizer_file, error)
            return f"this model's tokenizer cannot be used for grammars: {error}"

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if isinstance(self._tokenizer, str):
            raise InvalidRequest(self._tokenizer)
        try:
            start = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
            error = start.get_error()
        except (ValueError, RecursionError) as raised:
            error = str(raised)
        except BaseException as raised:  # a panic of the library is no Exception, and must end only this session
            log.exception("the grammar library panicked while it compiled a grammar")
            error = str(raised) or type(raised).__name__
        if error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_words(error)}", param=grammar.kind.param)
        return start


def _words(error: str) -> str:
    """llguidance's message, without the state of its parser."""
    return error.partition("<state>")[0].strip()[:_ERROR_LENGTH]


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's format. Raises ValueError."""
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        text = readable(grammar.text) if grammar.kind is GrammarKind.EBNF else grammar.text
        return grammar_from(_FORMATS[grammar.kind], text)
    schema = json.loads(grammar.text)
    guidance = schema.get("x-guidance") if isinstance(schema, dict) else None
    own = isinstance(guidance, dict) and not _BLANKS.keys().isdisjoint(guidance)
    defaults = _ONE_OF if own else _ONE_OF | _BLANKS
    return LLMatcher.grammar_from_json_schema(json.dumps(understood(closed(checked(schema)))), defaults=defaults)
