"""Proposals of a drafter that knows the texts of the sessions, and is not always right, or in time."""

import numpy as np

from tests.support.target.driving import chain, random_tree
from tests.support.tiny import VOCAB


class Drafts:
    """Called with a session and its tokens. kind: right, wrong, mixed or late; texts: new tokens of each session."""

    def __init__(self, kind, requests, texts):
        self.kind, self.random = kind, np.random.default_rng(1)
        self.texts = {r.session_id: r.tokens.tolist() + texts[r.session_id] for r in requests}
        self.held = {}

    def __call__(self, session_id, path):
        return getattr(self, self.kind)(session_id, path)

    def right(self, session_id, path, count=12):
        ahead = self.texts[session_id][len(path) : len(path) + count]
        return [chain(session_id, path, ahead)] if ahead else []

    def wrong(self, session_id, path):
        return [random_tree(self.random, session_id, path, VOCAB, 6)]

    def mixed(self, session_id, path):
        """The right path to some depth, among wrong siblings that seem likelier."""
        ahead = self.texts[session_id][len(path) : len(path) + int(self.random.integers(0, 14))]
        tree = [chain(session_id, path, ahead, -1.0)] if ahead else []
        places = [path + ahead[: int(self.random.integers(0, len(ahead) + 1))] for _ in range(2)]
        return tree + [chain(session_id, place, self.random.integers(3, VOCAB, 3).tolist(), -0.1) for place in places]

    def late(self, session_id, path):
        """What was right some tokens ago, or nothing."""
        held = self.held.setdefault(session_id, [])
        held.append(self.right(session_id, path))
        return held.pop(0) if len(held) > 1 and self.random.random() < 0.6 else []
