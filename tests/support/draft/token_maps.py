"""Token maps of frequent tokens, and a prompt."""

from __future__ import annotations

import numpy as np

from tests.support.tiny import VOCAB

RNG = np.random.default_rng(3)
PROMPT = RNG.integers(4, VOCAB, 21).tolist()
IDS = RNG.permutation(VOCAB)[:90].tolist()


def write_map(folder, ids):
    """Write a file as torch.save does. Returns its path."""
    import torch

    torch.save(ids, folder / "freq.pt")
    return str(folder / "freq.pt")
