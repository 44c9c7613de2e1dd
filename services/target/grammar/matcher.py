"""Grammars: the tokens that may follow a session's text, computed by llguidance.

    compile   a grammar becomes an automaton once for all sessions, in separate threads (compile_queue.py), first
              in another process (sandbox.py)
    match     each session has a matcher, which its committed tokens advance
    mask      the allowed tokens, also after each draft node; see sampling/masks.py

A session with a grammar ends with one of the model's end-of-sequence tokens as soon as no other token is allowed, and
may end with one wherever its text is complete.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from outrider.errors import InvalidRequest, OutriderError
from outrider.serving.messages import Grammar
from outrider.speculation.tree import TreeSlice
from services.target.grammar.compile_queue import CompileQueue, Job
from services.target.grammar.sandbox import idle_sandbox
from services.target.grammar.source import in_words, refusal

log = logging.getLogger(__name__)

_CACHED = 64  # compiled grammars in the cache


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
        why = f"the grammar cannot be followed: {in_words(state.get_error())}"
        self.fault = InvalidRequest(why, param=self.grammar.kind.param)


class Grammars:
    """Compiles grammars for one model and caches those used last."""

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """tokenizer_file: tokenizer.json of the model's folder, if it has one."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiled: OrderedDict[Grammar, Job] = OrderedDict()
        self._waiting: dict[int, Job] = {}  # by session id
        self._callers: dict[int, str] = {}  # of sessions with a grammar
        self._alone: set[int] = set()  # sessions with an automaton of their own
        self._queue = CompileQueue(self._compile)
        self._tokenizer_lock = threading.Lock()

    def check(self) -> None:
        """Raise InvalidRequest if this model does not support grammars."""
        if self._tokenizer_file is None:
            raise InvalidRequest("this model's folder has no tokenizer.json, so it cannot follow a grammar")
        if not self._eos:
            raise InvalidRequest("this model has no end-of-sequence token, so it cannot follow a grammar")

    def load(self) -> None:
        """Prepare now, if the model supports grammars, instead of with the first grammar: tokenizer and process."""
        if self._tokenizer_file is None or not self._eos:
            return

        def prepare() -> None:
            self._loaded_tokenizer()
            try:
                with idle_sandbox() as sandbox:
                    sandbox.start()
            except OutriderError as error:
                log.warning("%s", error.message)

        threading.Thread(target=prepare, name="grammar", daemon=True).start()

    def request(self, session_id: int, grammar: Grammar, caller: str = "", *, bounded: bool = True) -> None:
        """Compile a grammar for a session; `ready` reports when it is done. `check` must have passed.

        caller: of the session; callers take turns. bounded: raise Overloaded if too many of it wait
        """
        job = self._compiled.get(grammar)
        if job is None or not self._queue.join(job, session_id):
            job = Job(grammar, {session_id})
        if not job.begun:
            try:
                self._queue.add(job, caller, bounded=bounded)
            except OutriderError:
                self._queue.leave(job, session_id)
                raise
        self._compiled[grammar] = job
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        self._waiting[session_id], self._callers[session_id] = job, caller

    def renew(self, session_id: int, grammar: Grammar) -> bool:
        """Compile a grammar again for a session that exceeded a limit, and for later sessions.

        Copies share a lexer, whose state grows with every text up to a limit, which other sessions may have used up.
        Returns False if the session had an automaton of its own already, so that compiling again cannot help.
        """
        self._compiled.pop(grammar, None)
        if session_id in self._alone:
            return False
        self._alone.add(session_id)
        job = self._waiting[session_id] = Job(grammar, {session_id})
        self._queue.add(job, self._callers[session_id], bounded=False)
        return True

    def forget(self, session_id: int) -> None:
        """Drop the state of a session that has ended. A grammar that only it waits for is not compiled."""
        if (job := self._waiting.pop(session_id, None)) is not None:
            self._queue.leave(job, session_id)
        self._callers.pop(session_id, None)
        self._alone.discard(session_id)

    def wait(self, seconds: float) -> None:
        """Wait until a requested grammar is ready, at most `seconds`."""
        wait([job.future for job in self._waiting.values()], seconds, FIRST_COMPLETED)

    def ready(self) -> Iterator[tuple[int, Grammar, LLMatcher | OutriderError]]:
        """Sessions whose grammars were compiled since the last call, with the automaton or the error."""
        for session_id, job in list(self._waiting.items()):
            if job.future.done():
                del self._waiting[session_id]
                error = job.future.exception()
                assert error is None or isinstance(error, OutriderError), error
                yield session_id, job.grammar, job.future.result() if error is None else error

    # --- in the threads ---

    def _loaded_tokenizer(self) -> LLTokenizer | str:
        with self._tokenizer_lock:
            return self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer | str:
        """The tokenizer, or the reason why it cannot be used."""
        assert self._tokenizer_file is not None, "checked when a session opened"
        try:
            return LLTokenizer(self._tokenizer_file.read_text(), n_vocab=self._vocab_size, eos_token=self._eos)
        except Exception as error:  # a tokenizer file may hold anything
            log.warning("%s cannot be used for grammars, which are rejected: %s", self._tokenizer_file, error)
            return f"this model's tokenizer cannot be used for grammars: {error}"

    def _compile(self, grammar: Grammar, wanted: Callable[[], bool]) -> LLMatcher:
        """The automaton of a grammar. wanted: False once no session waits for it. Raises OutriderError, Abandoned."""
        tokenizer = self._loaded_tokenizer()
        if isinstance(tokenizer, str):
            raise InvalidRequest(tokenizer)
        with idle_sandbox() as sandbox:
            source = sandbox.translate(grammar, wanted)
        try:
            start = LLMatcher(tokenizer, source, log_level=0)
            if error := start.get_error():
                raise refusal(grammar, error)
        except InvalidRequest:
            raise
        except BaseException as raised:  # a panic of the library is no Exception, and must end only this session
            log.exception("the grammar library panicked while it compiled a grammar")
            raise refusal(grammar, str(raised) or type(raised).__name__) from None
        return start
