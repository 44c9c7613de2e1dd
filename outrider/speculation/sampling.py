"""How a token is drawn from logits: the rules, in NumPy, that both services follow.

    logits -> no stop token before min_tokens -> / temperature -> top_k -> top_p (of what top_k left) -> min_p
           -> argmax(log p + noise)

At temperature 0 the token is the argmax of the logits and no noise is used. Ties go to the lowest token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest
from outrider.speculation import noise

# Below this temperature a request is greedy, as in SGLang.
GREEDY_BELOW = 1e-6


@dataclass(frozen=True)
class SamplingParams:
    """How a session's tokens are drawn. top_k 0, top_p 1 and min_p 0 are off. Raises InvalidRequest if out of range."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature must lie in [0, 100], not {self.temperature}", param="temperature")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or more, not {self.top_k}", param="top_k")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must lie in (0, 1], not {self.top_p}", param="top_p")
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequest(f"min_p must lie in [0, 1], not {self.min_p}", param="min_p")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest(f"seed must lie in [0, 2^64), not {self.seed}", param="seed")

    @property
    def greedy(self) -> bool:
        """True if tokens are the argmax and no noise is used."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class StopConditions:
    """When a session ends by itself; lengths count new tokens. Raises InvalidRequest if out of range."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be 1 or more, not {self.max_tokens}", param="max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must lie in [0, max_tokens={self.max_tokens}], not {self.min_tokens}",
                param="min_tokens",
            )

    def stop_ids(self, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
        """The token ids that end the session, given the model's own end-of-sequence ids."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_token_ids))


def log_softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Natural-log probabilities over the last axis, in float64."""
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))


def filtered_log_probs(logits: NDArray[np.floating], params: SamplingParams) -> NDArray[np.float64]:
    """Log-probabilities that tokens are drawn from, not normalised after filtering; removed tokens are -inf.

    logits: [V]; params must not be greedy. Returns [V] float64.
    """
    log_p = log_softmax(logits.astype(np.float64) / params.temperature)
    order = np.argsort(-log_p, kind="stable")
    keep = np.ones(len(order), dtype=bool)  # in descending order of probability
    if params.top_k:
        keep[params.top_k :] = False
    p = np.where(keep, np.exp(log_p[order]), 0.0)
    if params.top_p < 1.0:
        before = np.cumsum(p) - p  # mass of the likelier tokens
        keep &= before < params.top_p * p.sum()
    if params.min_p > 0.0:
        keep &= p >= params.min_p * p[0]
    filtered = np.full(len(order), -np.inf)
    filtered[order[keep]] = log_p[order[keep]]
    return filtered


def sample(logits: NDArray[np.floating], params: SamplingParams, position: int) -> int:
    """The token at an absolute position, given the logits of the token before it. logits: [V]."""
    if params.greedy:
        return int(np.argmax(logits))
    tokens = np.arange(len(logits))
    noisy = filtered_log_probs(logits, params) + noise.gumbel(params.seed, np.array([position]), tokens)[0]
    return int(np.argmax(noisy))
