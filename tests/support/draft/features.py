"""Random features of a target, and sessions that receive them."""

from __future__ import annotations

import numpy as np

from outrider.serving.features import FeatureBlock
from tests.support.draft.helpers import request, settle
from tests.support.tiny import VOCAB

RNG = np.random.default_rng(0)
FEATURES = RNG.standard_normal((200, 48)).astype(np.float32)
PROMPT = RNG.integers(4, VOCAB, 21).tolist()


def feed(engine, first, stop, session_id=1):
    """Send the features of positions first .. stop - 1."""
    engine.receive_features([FeatureBlock(session_id, first, FEATURES[first:stop].view(np.uint8))])


def start(engine, tokens, session_id=1, **options):
    """Open a session, and send the features that a target has after prefill."""
    engine.open(request(session_id, tokens, max_tokens=100, **options))
    feed(engine, 0, len(tokens) - 1, session_id)
    return settle(engine)
