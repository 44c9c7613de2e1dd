"""A prompt."""

import numpy as np

from tests.support.tiny import VOCAB

PROMPT = np.random.default_rng(2).integers(4, VOCAB, 23).tolist()
