"""A session of the engine: its tokens and pages, its draft tree, and its sampling options."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from outrider.errors import OutriderError
from outrider.serving.messages import Grammar, OpenSession
from outrider.serving.session import Session
from outrider.speculation.sampling import GREEDY_BELOW
from outrider.speculation.tree import SpeculationTree
from services.target.grammar.matcher import Matcher
from services.target.kernels.cpu import sampling as compiled
from services.target.sampling.logprobs import PromptScores
from services.target.sampling.penalties import PenaltyCounts


@dataclass(frozen=True)
class TargetSession:
    """An open session.

    tree:          its draft tokens
    stop_ids:      tokens that end it
    tally:         counts of its tokens for penalties
    matcher:       the state of its grammar
    top:           most probable tokens to report with each new one; None for no log-probabilities
    divisor:       temperature at which log-probabilities of new tokens are reported
    prompt_scores: log-probabilities of its prompt
    sampling:      its sampling parameters, as the compiled kernel reads them
    stops:         stop_ids as int64, as the compiled kernel reads them
    plain:         True if its tokens are sampled from the model's logits unchanged and without log-probabilities
    """

    session: Session
    tree: SpeculationTree
    stop_ids: frozenset[int]
    tally: PenaltyCounts | None
    matcher: Matcher | None
    top: int | None
    divisor: float
    prompt_scores: PromptScores | None
    sampling: bytes
    plain: bool = field(init=False)
    stops: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", array("q", self.stop_ids).tobytes())
        plain = self.tally is None and self.matcher is None and self.top is None and not self.session.stop.min_tokens
        object.__setattr__(self, "plain", plain)

    @classmethod
    def of(cls, request: OpenSession, session: Session, stop_ids: frozenset[int], vocab_size: int) -> TargetSession:
        """A new session, without its grammar, which `guided` adds once it is compiled."""
        params = request.sampling
        scores_prompt = request.prompt_logprobs is not None and session.new_tokens == 0
        return cls(
            session,
            SpeculationTree(request.tokens),
            stop_ids,
            PenaltyCounts(params, request.tokens, request.prompt_length) if params.adjusts else None,
            None,
            None if request.logprobs is None else min(request.logprobs, vocab_size),
            params.temperature if request.scaled_logprobs and params.temperature >= GREEDY_BELOW else 1.0,
            PromptScores(request.prompt_length, min(request.prompt_logprobs or 0, vocab_size))
            if scores_prompt
            else None,
            compiled.pack(params),
        )

    def append(self, tokens: NDArray[np.uint32]) -> None:
        """Commit tokens, [n]."""
        self.session.append(tokens)
        self.tree.commit(tokens)
        if self.tally is not None:
            self.tally.append(tokens)
        if self.matcher is not None and int(tokens[-1]) not in self.stop_ids:
            self.matcher.commit(tokens.tolist())

    def guided(self, start: LLMatcher | OutriderError, grammar: Grammar) -> TargetSession:
        """The session with its compiled grammar.

        Raises the error if it does not compile, and InvalidRequest if the committed tokens violate it.
        """
        if isinstance(start, OutriderError):
            raise start
        session = self.session
        return replace(self, matcher=Matcher(start, grammar, session.tokens[session.prompt_length :].tolist()))

    def admits(self, node: int) -> bool:
        """True for a node that the grammar allows and that does not end the session."""
        return self.tree.token[node] not in self.stop_ids and (
            self.matcher is None or self.matcher.admits(self.tree.path_tokens(node))
        )
