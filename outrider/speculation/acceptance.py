"""The verification rule in plain NumPy: sample after every node, then walk along the samples.

From the root, go to the child whose token was sampled at the present node, as long as there is one; the last sample is
the bonus token. Each sample follows the target's distribution and is independent of the tree, so the committed tokens
are those of plain decoding for any tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.speculation.sampling import SamplingParams, adjusted, sample
from outrider.speculation.tree import TreeSlice

_MIN_ACCUMULATED = 1e-9

# Logits [V] of the next token, given a whole path.
NextLogits = Callable[[list[int]], NDArray[np.floating]]
# Tokens that may be sampled [V], given the tokens after the prompt.
Allowed = Callable[[list[int]], NDArray[np.bool_]]


def accepted_path(draft: TreeSlice, sampled: NDArray[np.integer]) -> tuple[list[int], int]:
    """The accepted path of a draft tree.

    draft: N nodes. sampled: [N + 1], the token sampled after the root (index 0) and after node i (index i + 1).
    Returns the accepted nodes, as indices into the draft, and the bonus token.
    """
    children = {
        (parent, token): i
        for i, (parent, token) in enumerate(zip(draft.parents.tolist(), draft.tokens.tolist(), strict=True))
    }
    samples = sampled.tolist()
    path: list[int] = []
    node = -1
    while (child := children.get((node, samples[node + 1]))) is not None:
        path.append(child)
        node = child
    return path, samples[node + 1]


@dataclass(frozen=True)
class Thresholds:
    """Lossy acceptance of draft tokens in sampled text; with 1 and 1 acceptance is exact.

    single:      a child of at least this probability is accepted, whatever token was sampled
    accumulated: children of total probability p are accepted with probability p / accumulated
    """

    single: float = 1.0
    accumulated: float = 1.0

    @property
    def exact(self) -> bool:
        """True if acceptance is exact."""
        return self.single >= 1.0 and self.accumulated >= 1.0

    def relax(
        self,
        draft: TreeSlice,
        sampled: NDArray[np.integer],
        probabilities: NDArray[np.floating],
        coins: NDArray[np.floating],
    ) -> NDArray[np.int64]:
        """The samples, some of them replaced by a child's token. For sessions that are not greedy.

        sampled: [N + 1], after the root and after each node; -1 where no token was allowed. probabilities: [N], of each
        node's token after its parent. coins: [N + 1], uniform in [0, 1), independent of the samples. A sample that is a
        child's token stays, which accepts a child of probability p with probability p; the coin adds the difference to
        the threshold.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(draft.parents.tolist()):
            children.setdefault(parent + 1, []).append(node)
        relaxed = np.array(sampled, np.int64)
        for row, nodes in children.items():
            if relaxed[row] < 0 or relaxed[row] in draft.tokens[nodes]:
                continue
            chosen = self._choose(probabilities[nodes], float(coins[row]))
            if chosen is not None:
                relaxed[row] = draft.tokens[nodes[chosen]]
        return relaxed

    def _choose(self, p: NDArray[np.floating], coin: float) -> int | None:
        """Index of the child that is accepted although another token was sampled, or None. p: of each child."""
        likeliest, total = int(np.argmax(p)), float(p.sum())
        if not 0.0 < total < 1.0:
            return None
        if p[likeliest] >= self.single:
            return likeliest
        extra = (min(1.0, total / max(self.accumulated, _MIN_ACCUMULATED)) - total) / (1.0 - total)
        if coin >= extra:
            return None
        shares = np.cumsum(p)  # the last one may be below the total by a rounding error
        last = int(np.searchsorted(shares, shares[-1]))
        return min(int(np.searchsorted(shares / total, coin / extra, side="right")), last)


def sample_next(
    next_logits: NextLogits,
    path: list[int],
    params: SamplingParams,
    prompt_length: int,
    allowed: Allowed | None = None,
) -> int:
    """Sample the token after a path, with a model given as a function. For tests."""
    tokens = np.array(path, dtype=np.int64)
    logits = next_logits(path)
    if params.adjusts:
        logits = adjusted(logits, params, tokens[:prompt_length], tokens[prompt_length:])
    return sample(logits, params, len(path), None if allowed is None else allowed(path[prompt_length:]))


def verify(
    next_logits: NextLogits, path: list[int], draft: TreeSlice, params: SamplingParams, prompt_length: int | None = None
) -> list[int]:
    """The tokens that one verification step commits, with a model given as a function. For tests.

    prompt_length: length of the prompt in the path; by default the whole path.
    """
    rows = [path]
    for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        rows.append([*rows[parent + 1], token])
    prompt_length = len(path) if prompt_length is None else prompt_length
    sampled = np.array([sample_next(next_logits, row, params, prompt_length) for row in rows])
    accepted, bonus = accepted_path(draft, sampled)
    return [*draft.tokens[accepted].tolist(), bonus]


def decode(
    next_logits: NextLogits, prompt: list[int], params: SamplingParams, steps: int, allowed: Allowed | None = None
) -> list[int]:
    """The new tokens of plain decoding, with a model given as a function. For tests."""
    path = list(prompt)
    for _ in range(steps):
        path.append(sample_next(next_logits, path, params, len(prompt), allowed))
    return path[len(prompt) :]
