"""The open sessions: checked when they open, scheduled once their grammars are ready, and closed at their end."""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import EngineFault, InvalidRequest, OutriderError
from outrider.serving.messages import OpenSession, SessionFailure
from outrider.serving.scheduler import Scheduler
from outrider.serving.session import Session
from services.target.features.features import Features
from services.target.grammar.matcher import Grammars
from services.target.model.base import Model
from services.target.sampling.session import TargetSession
from services.target.step.batch import SessionWork


class OpenSessions:
    """The open sessions of one engine.

    by_id:   all of them, also those that wait for their grammar or for pages
    longest: most tokens of a session
    """

    def __init__(
        self,
        model: Model,
        scheduler: Scheduler,
        features: Features,
        longest: int,
        ended: Callable[[TargetSession], None],
    ) -> None:
        """ended: called with each closed session after its pages are returned."""
        self.by_id: dict[int, TargetSession] = {}
        self.longest = longest
        self._vocab_size = model.vocab_size
        self._eos = tuple(token for token in model.eos_token_ids if token < model.vocab_size)
        self.grammars = Grammars(model.tokenizer_file, model.vocab_size, self._eos)
        self._scheduler, self._features, self._ended = scheduler, features, ended

    def open(self, request: OpenSession) -> None:
        """Open a session. Raises InvalidRequest."""
        stop_ids = self._check(request)
        self.close(request.session_id)
        session = Session(request, self._scheduler.prefix)
        self._features.open(request)
        try:
            entry = TargetSession.of(request, session, stop_ids, self._vocab_size)
            if request.grammar is None:
                self._scheduler.add(session)
            else:
                self.grammars.request(session.id, request.grammar, request.caller, bounded=session.new_tokens == 0)
        except Exception:
            self._features.close(session.id)
            raise
        self.by_id[session.id] = entry

    def _check(self, request: OpenSession) -> frozenset[int]:
        """The stop tokens of a session that can be opened. Raises InvalidRequest."""
        request.validate(self._vocab_size, self.longest)
        stop_ids = request.stop.stop_ids(self._eos)
        if request.grammar is not None:
            self.grammars.check()
            stop_ids |= frozenset(self._eos)
        if stop_ids and not 0 <= min(stop_ids) <= max(stop_ids) < self._vocab_size:
            raise InvalidRequest(
                f"stop token ids must lie in the vocabulary of {self._vocab_size} tokens", param="stop_token_ids"
            )
        if len(request.tokens) - request.prompt_length >= request.stop.max_tokens:
            raise InvalidRequest("the session has all of its max_tokens already", param="max_tokens")
        return stop_ids

    def close(self, session_id: int, *, trusted: bool = True) -> None:
        """Close a session and free its pages. trusted: False if its cached tokens must not serve other sessions."""
        entry = self.by_id.pop(session_id, None)
        self.grammars.forget(session_id)
        if entry is not None:
            self._scheduler.remove(entry.session, trusted=trusted)
            self._features.close(session_id)
            self._ended(entry)

    def begin(self) -> list[SessionFailure]:
        """Schedule sessions whose grammars are ready. Returns a failure for each invalid grammar."""
        failures: list[SessionFailure] = []
        for session_id, grammar, start in self.grammars.ready():
            entry = self.by_id[session_id]
            try:
                self.by_id[session_id] = entry.guided(start, grammar)
                self._scheduler.add(entry.session)
            except OutriderError as error:
                met_a_limit = isinstance(error, InvalidRequest) and error is not start
                if not (met_a_limit and self.grammars.renew(session_id, grammar)):
                    failures.append(SessionFailure(session_id, error))
                    self.close(session_id)
        return failures

    def stuck(self, work: SessionWork, fault: EngineFault) -> list[SessionFailure]:
        """No token could be sampled for a session: it ends, unless a new automaton of its grammar can continue."""
        session = work.chunk.session
        matcher = self.by_id[session.id].matcher
        limit = None if matcher is None else matcher.fault
        if matcher is not None and limit is not None and self.grammars.renew(session.id, matcher.grammar):
            self._features.settle(work, (), goes_on=True)
            self._scheduler.remove(session)
            return []
        self.close(session.id, trusted=limit is not None)
        return [SessionFailure(session.id, limit or fault)]
