"""NGRAM: continues a text as earlier texts went on. Needs neither a model nor a device.

A lookup walks the stored n-grams below every suffix of the context and collects up to N - 1 nodes, by recency (BFS) or
by frequency (PROB), as SGLang does. In sessions that sample, siblings are ranked by log-share + noise instead, because
the target samples with the same noise. Lookups for the leaves of the tree, whose context is the text and the path to
the leaf, draft ahead while the target verifies.

Scores are probabilities: each commit updates how often suffixes of each length continued as stored.
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
from services.draft.drafters.base import Drafter, ExpandRequest, Expansion
from services.draft.ngrams.base import NO_NAMESPACE, Continuations, NgramOptions, Ngrams
from services.draft.sessions.session import DraftSession

log = logging.getLogger(__name__)

_LOOKUPS_PER_ROUND = 64
# Prompt tokens that are stored in one call, in a few milliseconds; lookups of other sessions run in between.
_SLICE = 512


def store(options: NgramOptions) -> Ngrams:
    """A store of n-grams, compiled if possible. Raises ConfigError if its memory cannot be reserved."""
    from services.draft.ngrams.compiled import CompiledNgrams
    from services.draft.ngrams.plain import PlainNgrams

    try:
        return CompiledNgrams(options)
    except MemoryError as error:
        raise ConfigError(f"{error}; lower --speculative-ngram-capacity, of which each node takes 32 bytes") from None
    except native.Unavailable as reason:
        log.warning("n-grams are not compiled: %s. Plain Python serves instead, more slowly", reason)
        return PlainNgrams(options)


class NgramDrafter(Drafter):
    """Drafts for all sessions from stored n-grams; sessions with different cache salts share nothing."""

    name = "NGRAM"
    expansions = 256
    expansions_per_step = 32
    min_reach = 0.02
    from_parents = False

    def __init__(self, options: NgramOptions, ngrams: Ngrams | None = None, corpus: Ngrams | None = None) -> None:
        """ngrams: the store; by default compiled if possible. corpus: a second store that is never changed."""
        self.options = options
        self.corpus = corpus
        self.ngrams = store(options) if ngrams is None else ngrams
        self._namespace_ids: dict[int, int] = {}  # by session
        self._known: dict[int, int] = {}  # by session: number of tokens that are stored
        self._secret = os.urandom(16)
        self._prompts: deque[tuple[NDArray[np.uint32], int, int]] = deque()  # to store: tokens, namespace, first token

    def open(self, session: DraftSession) -> None:
        """Store the session's prompt, so that its answer can copy from it."""
        namespace_id = self._namespace_ids[session.id] = self._namespace_id(session.cache_salt)
        self._known[session.id] = session.length
        if self.options.insert_prompts:
            self._prompts.append((session.tokens.copy(), namespace_id, 0))
            self.work()

    def flush(self) -> None:
        """Drop all stored n-grams."""
        self._prompts.clear()
        self.ngrams.clear()

    @property
    def busy(self) -> bool:
        """True while prompts wait to be stored."""
        return bool(self._prompts)

    def work(self) -> None:
        """Store a slice of a prompt; prompts take turns."""
        if self._prompts:
            tokens, namespace_id, first = self._prompts.popleft()
            self.ngrams.insert(tokens, namespace_id, first, first + _SLICE)
            if first + _SLICE < len(tokens):
                self._prompts.append((tokens, namespace_id, first + _SLICE))

    def _namespace_id(self, salt: str) -> int:
        if not salt:
            return NO_NAMESPACE
        digest = hashlib.blake2b(salt.encode(), digest_size=4, key=self._secret).digest()
        return min(int.from_bytes(digest, "little") | 1 << 31, NO_NAMESPACE - 1)

    def close(self, session: DraftSession) -> None:
        """Forget the session; its n-grams remain."""
        del self._namespace_ids[session.id], self._known[session.id]

    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """The root is looked up again, because a longer context may match longer n-grams."""
        del session, count, path
        return False

    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """Update scores by the new tokens, and store them."""
        del kept
        fresh, self._known[session.id] = session.length - self._known[session.id], session.length
        self._learn(session, session.tokens, fresh)

    def finished(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:
        """As for any commit; while drafting is paused, a whole answer may arrive with its end."""
        self._learn(session, np.concatenate([session.tokens, tokens]), len(tokens))

    def _learn(self, session: DraftSession, tokens: NDArray[np.uint32], fresh: int) -> None:
        """tokens: the session's; the last `fresh` of them are new."""
        options = self.options
        tail = tokens[-(fresh + max(options.branch_length - 1, options.max_match_window_size)) :]
        noisy = not session.sampling.greedy
        self.ngrams.commit(tail, fresh, noisy=noisy, namespace_id=self._namespace_ids[session.id])
        if self.corpus is not None:
            self.corpus.commit(tail, fresh, noisy=noisy, keep=False)

    def expand(self, requests: Sequence[ExpandRequest]) -> list[Expansion]:
        """Look up the best requests; the round is short, so that new roots do not wait for deep leaves."""
        return [self.look_up(request.session, request.node) for request in requests[:_LOOKUPS_PER_ROUND]]

    def warm_up(self, report: Progress = no_progress) -> None:
        """Nothing to compile."""

    def look_up(self, session: DraftSession, node: int) -> Expansion:
        """The expansion of a node from the stored n-grams."""
        options = self.options
        context = session.tokens[-options.max_match_window_size :]
        path = session.tree.path_tokens(node)
        if path:
            context = np.concatenate([context, np.array(path, np.uint32)])[-options.max_match_window_size :]
        keys = None
        if not session.sampling.greedy:
            keys = session.noise_keys(session.length + len(path) + np.arange(options.branch_length + 1))
        found = self.ngrams.look_up(context, keys, self._namespace_ids.get(session.id, NO_NAMESPACE))
        if self.corpus is not None:
            found = joined(found, self.corpus.look_up(context, keys))
        return Expansion(session, node, *found)


def joined(first: Continuations, second: Continuations) -> Continuations:
    """The union of two results; a node of both gets the higher score."""
    tokens, parents, log_scores = list(first.tokens), list(first.parents), list(first.log_scores)
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
