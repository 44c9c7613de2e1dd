"""Readers of features, and sessions whose features are compared with those of transformers."""

import numpy as np

from outrider.serving.features import FeatureFormat, decode
from tests.support.target.driving import chain, random_tree
from tests.support.tiny import VOCAB

LAYERS, WIDTH = 8, 48
F32 = FeatureFormat.FLOAT32


def configured(engine, spec, fusion=b""):
    engine.configure_features(spec.id(fusion), spec, fusion)
    return spec.id(fusion)


class Reader:
    """Serves sessions to their end and puts the blocks together; each position must come once, in order."""

    def __init__(self, engine, layout=F32):
        self.engine, self.layout = engine, layout
        self.tokens, self.rows, self.first, self.specs = {}, {}, {}, {}

    def open(self, request):
        self.engine.open(request)
        self.tokens.setdefault(request.session_id, request.tokens.tolist())
        self.rows.setdefault(request.session_id, [])
        self.specs[request.session_id] = request.feature_spec

    def step(self, proposals=None):
        if proposals is not None:
            for session_id, path in self.tokens.items():
                self.engine.receive(proposals(session_id, path), ())
        output = self.engine.step()
        assert not output.failures
        for commit in output.commits:
            self.tokens[commit.session_id] += commit.tokens.tolist()
        for block in output.features:
            rows = self.rows[block.session_id]
            assert block.spec_id == self.specs[block.session_id]
            first = self.first.setdefault(block.session_id, block.first)
            assert block.first == first + sum(map(len, rows))
            assert block.first + len(block.rows) < len(self.tokens[block.session_id])
            rows.append(decode(block.rows, self.layout))
        return output

    def run(self, proposals=None):
        while not self.engine.idle:
            self.step(proposals)
        self.engine.check()
        return self

    def states(self, session_id):
        return np.concatenate(self.rows[session_id])


def prompts(count, longest=60, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, rng.integers(2, longest)).tolist() for _ in range(count)]


def proposals_of(right, most=6, seed=1):
    """A random tree, and the right tokens, fewer than `most`."""
    rng = np.random.default_rng(seed)

    def proposals(session_id, path):
        ahead = right[session_id][len(path) : len(path) + int(rng.integers(1, most))]
        return [random_tree(rng, session_id, path, VOCAB, 4), chain(session_id, path, ahead)]

    return proposals
