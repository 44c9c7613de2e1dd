"""The draft's vocabulary: the tokens that the target generates most often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError


def check_count(count: int, vocab_size: int) -> None:
    """Raise ConfigError for more tokens than the target's vocabulary has."""
    if not 1 <= count <= vocab_size:
        raise ConfigError(f"--draft-vocab-size must lie between 1 and the target's {vocab_size}, not {count}")


def frequent_tokens(texts: Iterable[NDArray[np.uint32]], vocab_size: int, count: int) -> NDArray[np.int64]:
    """Ids of the `count` most frequent tokens of texts, ascending; ties go to the lower ids.

    Raises ConfigError for a count beyond the target's vocabulary.
    """
    check_count(count, vocab_size)
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-counts, kind="stable")[:count])


def coverage(texts: Iterable[NDArray[np.uint32]], ids: NDArray[np.int64], vocab_size: int) -> float:
    """Fraction of the tokens of texts that are among the ids."""
    known = np.zeros(vocab_size, bool)
    known[ids] = True
    inside = total = 0
    for text in texts:
        inside += int(known[text].sum())
        total += len(text)
    return inside / max(total, 1)


def draft_ids(ids: NDArray[np.int64], vocab_size: int) -> NDArray[np.int32]:
    """The draft's id of each of the target's tokens, [vocab_size]; -1 for tokens outside the draft's vocabulary."""
    places = np.full(vocab_size, -1, np.int32)
    places[ids] = np.arange(len(ids))
    return places
