"""NGRAM: continues a text as earlier texts went on. Needs no model and no device.

A lookup walks the stored n-grams below every suffix of the context and collects up to N - 1 nodes, by recency (BFS) or
by frequency (PROB), as SGLang does. Where a session samples, siblings are ranked by log-share + noise instead, because
the target draws with the same noise. Lookups for the leaves of the tree, whose context is the text and the path to the
leaf, carry the draft on while the target verifies.

Scores are probabilities: each commit teaches how often suffixes of each length went on as stored.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider import native
from outrider.errors import ConfigError
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.base import Drafter, Growth, Wish
from services.draft.ngrams.base import NO_LEAD, Continuations, NgramOptions, Ngrams
from services.draft.sessions.session import DraftSession

log = logging.getLogger(__name__)

_LOOKUPS_A_ROUND = 64
# Tokens of prompts that are stored in one go, in a few milliseconds; lookups for other sessions come between.
_SLICE = 512


def store(options: NgramOptions) -> Ngrams:
    """The n-grams, compiled if they can be. Raises ConfigError for more of them than there is memory for."""
    from services.draft.ngrams.compiled import CompiledNgrams
    from services.draft.ngrams.plain import PlainNgrams

    try:
        return CompiledNgrams(options)
    except MemoryError as error:
        raise ConfigError(f"{error}; give --speculative-ngram-capacity a smaller number, of 32 bytes each") from None
    except native.Unavailable as reason:
        log.warning("n-grams are not compiled: %s. Plain ones serve instead, more slowly", reason)
        return PlainNgrams(options)


class NgramDrafter(Drafter):
    """Drafts for all sessions from what was stored; sessions of different cache salts share nothing."""

    name = "NGRAM"
    expansions = 256
    step_wishes = 32
    least_reach = 0.02
    from_parents = False

    def __init__(self, options: NgramOptions, ngrams: Ngrams | None = None, corpus: Ngrams | None = None) -> None:
        """ngrams: where paths are stored; by default compiled if that can be. corpus: what stays as it is."""
        self.options = options
        self.corpus = corpus
        self.ngrams = store(options) if ngrams is None else ngrams
        self._leads: dict[int, int] = {}  # by session
        self._known: dict[int, int] = {}  # by session: tokens that were learned from
        self._secret = os.urandom(16)
        self._prompts: deque[tuple[NDArray[np.uint32], int, int]] = deque()  # still to store: tokens, lead, from where

    def open(self, session: DraftSession) -> None:
        """Store what the session has so far, so that its answer can copy from its prompt."""
        lead = self._leads[session.id] = self._lead(session.cache_salt)
        self._known[session.id] = session.length
        if self.options.insert_prompts:
            self._prompts.append((session.tokens.copy(), lead, 0))
            self.work()

    def flush(self) -> None:
        """Forget all paths."""
        self._prompts.clear()
        self.ngrams.clear()

    @property
    def busy(self) -> bool:
        """True while prompts are to be stored."""
        return bool(self._prompts)

    def work(self) -> None:
        """Store a slice of a prompt; they take turns."""
        if self._prompts:
            tokens, lead, first = self._prompts.popleft()
            self.ngrams.insert(tokens, lead, first, first + _SLICE)
            if first + _SLICE < len(tokens):
                self._prompts.append((tokens, lead, first + _SLICE))

    def _lead(self, salt: str) -> int:
        if not salt:
            return NO_LEAD
        digest = hashlib.blake2b(salt.encode(), digest_size=4, key=self._secret).digest()
        return min(int.from_bytes(digest, "little") | 1 << 31, NO_LEAD - 1)

    def close(self, session: DraftSession) -> None:
        """What was learned stays."""
        del self._leads[session.id], self._known[session.id]

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """A longer context may match more: the root is looked up again."""
        del session, count, path
        return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Learn from the new tokens, and store the end of the session."""
        del kept
        fresh, self._known[session.id] = session.length - self._known[session.id], session.length
        self._learn(session, session.tokens, fresh)

    def ended(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """As of any commit: while no hints are wanted, a whole answer may come with its end."""
        self._learn(session, np.concatenate([session.tokens, tokens]), len(tokens))

    def _learn(self, session: DraftSession, tokens: NDArray[np.uint32], fresh: int) -> None:
        """tokens: the session's; the last `fresh` of them are new."""
        options = self.options
        tail = tokens[-(fresh + max(options.branch_length - 1, options.max_match_window_size)) :]
        noisy = not session.sampling.greedy
        self.ngrams.commit(tail, fresh, noisy=noisy, lead=self._leads[session.id])
        if self.corpus is not None:
            self.corpus.commit(tail, fresh, noisy=noisy, keep=False)

    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """Look the best wishes up; the round is short, so that new roots do not wait for far leaves."""
        return [self._look_up(wish.session, wish.node) for wish in wishes[:_LOOKUPS_A_ROUND]]

    def warm_up(self, tell: Progress = no_progress) -> None:
        """Nothing to do."""

    def _look_up(self, session: DraftSession, node: int) -> Growth:
        options = self.options
        context = session.tokens[-options.max_match_window_size :]
        path = session.tree.path_tokens(node)
        if path:
            context = np.concatenate([context, np.array(path, np.uint32)])[-options.max_match_window_size :]
        keys = None
        if not session.sampling.greedy:
            keys = session.keys(session.length + len(path) + np.arange(options.branch_length + 1))
        found = self.ngrams.look_up(context, keys, self._leads.get(session.id, NO_LEAD))
        if self.corpus is not None:
            found = joined(found, self.corpus.look_up(context, keys))
        return Growth(session, node, *found)


def joined(first: Continuations, second: Continuations) -> Continuations:
    """Both; what they both say is there once, as the one says it that believes in it more."""
    tokens, parents, log_scores = (list(column) for column in first)
    known = {node: place for place, node in enumerate(zip(parents, tokens, strict=True))}
    places: list[int] = []  # of the second's nodes
    for token, parent, log_score in zip(*second, strict=True):
        above = places[parent] if parent >= 0 else parent
        place = known.setdefault((above, token), len(tokens))
        places.append(place)
        if place < len(tokens):
            log_scores[place] = max(log_scores[place], log_score)
        else:
            tokens.append(token)
            parents.append(above)
            log_scores.append(log_score)
    return Continuations(tokens, parents, log_scores)
