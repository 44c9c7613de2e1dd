"""Sessions of a feature-based head whose target is the test: it sends features, and commits what it likes."""

import numpy as np

from outrider.serving.features import FeatureBlock
from outrider.speculation.proposal import Commit, path_hash
from tests.support.draft.helpers import request
from tests.support.tiny import VOCAB

FEATURES = np.random.default_rng(3).standard_normal((200, 48)).astype(np.float32)


class FedSession:
    """One session of an engine, with features from the test; the target accepts any path."""

    def __init__(self, engine, number, length, sampling, **options):
        self.engine, self.number = engine, number
        self.rng = np.random.default_rng([length, number])
        self.tokens = self.rng.integers(4, VOCAB, length).tolist()
        engine.open(request(number, self.tokens, sampling, **({"max_tokens": 100} | options)))

    def feed(self, first):
        rows = FEATURES[first : len(self.tokens)].view(np.uint8)
        self.engine.receive_features([FeatureBlock(self.number, first, rows)])

    def go_on(self, proposal):
        """Commit along a path of the proposal, and a token that it does not have."""
        path = []
        if proposal is not None:
            node = int(self.rng.integers(len(proposal.tokens)))
            while node >= 0:
                path.append(int(proposal.tokens[node]))
                node = int(proposal.parents[node])
        self.feed(self.commit([*path[::-1], 5]))

    def commit(self, tokens):
        """Commit tokens, whose features come later. Returns the first position without features."""
        before = len(self.tokens)
        self.tokens += tokens
        new = np.array(tokens, np.uint32)
        self.engine.receive([], [Commit(self.number, before, new, path_hash(np.array(self.tokens)))])
        return before
