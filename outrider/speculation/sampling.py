"""The sampling rules of both services, in plain NumPy.

    logits -> penalties, bias -> grammar -> no stop token before min_tokens
           -> / temperature -> top_k -> top_p (of the rest after top_k) -> min_p -> argmax(log p + noise)

Penalties depend on the token's own path, draft tokens included: repetition_penalty on the whole path, presence and
frequency penalties on the path after the prompt. For a token that occurs `count` times after the prompt

    x -> x / repetition_penalty if x > 0 else x * repetition_penalty           if it occurs anywhere in the path
    x -> x + (bias - frequency_penalty * count - presence_penalty * (count > 0))

in float64, rounded once to float32. min_tokens is ignored where a grammar allows only stop tokens. At temperature 0 the
token is the argmax, without noise. Ties go to the lowest token id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InvalidRequest
from outrider.speculation import noise
from outrider.speculation.proposal import Logprobs

# Below this temperature a request is greedy, as in SGLang.
GREEDY_BELOW = 1e-6
MAX_REPETITION_PENALTY = 10.0
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a session. Raises InvalidRequest if one is out of range.

    top_k 0, top_p 1, min_p 0, presence_penalty 0, frequency_penalty 0 and repetition_penalty 1 are off. top_p 0, the
    end of OpenAI's range, keeps the likeliest token: it becomes top_k 1.
    logit_bias: pairs of a token id and the bias of its logit
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise InvalidRequest(f"temperature must lie in [0, 100], not {self.temperature}", param="temperature")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k must be 0 (off) or more, not {self.top_k}", param="top_k")
        if not 0.0 <= self.top_p <= 1.0:
            raise InvalidRequest(f"top_p must lie in [0, 1], not {self.top_p}", param="top_p")
        if self.top_p == 0.0:
            object.__setattr__(self, "top_k", 1)
            object.__setattr__(self, "top_p", 1.0)
        if not 0.0 <= self.min_p <= 1.0:
            raise InvalidRequest(f"min_p must lie in [0, 1], not {self.min_p}", param="min_p")
        if not 0 <= self.seed < 2**64:
            raise InvalidRequest(f"seed must lie in [0, 2^64), not {self.seed}", param="seed")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise InvalidRequest(f"{name} must lie in [-2, 2], not {getattr(self, name)}", param=name)
        if not 0.0 < self.repetition_penalty <= MAX_REPETITION_PENALTY:
            raise InvalidRequest(
                f"repetition_penalty must lie in (0, {MAX_REPETITION_PENALTY:g}], not {self.repetition_penalty}",
                param="repetition_penalty",
            )
        self._check_bias()

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias may name at most {MAX_BIASED_TOKENS} tokens", param="logit_bias")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise InvalidRequest("logit_bias names a token twice", param="logit_bias")
        for token, bias in self.logit_bias:
            if token < 0:
                raise InvalidRequest(f"logit_bias: {token} is no token id", param="logit_bias")
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(f"logit_bias must lie in [-100, 100], not {bias}", param="logit_bias")

    @property
    def counts(self) -> bool:
        """True if a token's logit depends on the number of its occurrences after the prompt."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts(self) -> bool:
        """True if penalties or bias change logits."""
        return self.counts or self.repetition_penalty != 1.0 or bool(self.logit_bias)

    def shift(self, bias: float, count: int) -> float:
        """Sum added to the logit of a token with this bias and `count` occurrences after the prompt."""
        return bias - self.frequency_penalty * count - self.presence_penalty * (count > 0)

    @property
    def greedy(self) -> bool:
        """True if tokens are the argmax, without noise."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class StopConditions:
    """When a session ends by itself; lengths in new tokens. Raises InvalidRequest if one is out of range."""

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


def logprobs(logits: NDArray[np.floating], tokens: NDArray[np.integer], first: int, top: int) -> Logprobs:
    """Log-probabilities of tokens and of the `top` most likely ones. logits: [n, V], unchanged from the model.

    tokens: [n]; first: absolute position of the first token
    """
    log_p = log_softmax(logits).astype(np.float32)
    best = np.argsort(-log_p, axis=-1, kind="stable")[:, :top]
    values = log_p[np.arange(len(tokens)), tokens]
    return Logprobs(first, values, best.astype(np.uint32), np.take_along_axis(log_p, best, axis=-1))


def filtered_log_probs(logits: NDArray[np.floating], params: SamplingParams) -> NDArray[np.float64]:
    """Log-probabilities that tokens are sampled from, not normalised after filtering; removed tokens are -inf.

    logits: [V]; params must not be greedy. Returns [V] float64.
    """
    log_p = log_softmax(logits.astype(np.float64) / params.temperature)
    order = np.argsort(-log_p, kind="stable")
    keep = np.ones(len(order), dtype=bool)  # in descending order of probability
    if params.top_k:
        keep[params.top_k :] = False
    # Relative to the most likely token, so that equal tokens are kept or removed together in spite of rounding.
    p = np.where(keep, np.exp(log_p[order] - log_p[order[0]]), 0.0)
    if params.top_p < 1.0:
        before = np.cumsum(p) - p  # mass of the more likely tokens
        keep &= before < params.top_p * p.sum()
    if params.min_p > 0.0:
        keep &= p >= params.min_p * p[0]
    filtered = np.full(len(order), -np.inf)
    filtered[order[keep]] = log_p[order[keep]]
    return filtered


def adjusted(
    logits: NDArray[np.floating], params: SamplingParams, prompt: NDArray[np.integer], output: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Logits after penalties and bias. logits: [V]; prompt, output: the path's tokens, in two parts."""
    x = logits.astype(np.float64)
    counts = np.bincount(output, minlength=len(x)) if len(output) else np.zeros(len(x), np.int64)
    occurs = counts > 0
    occurs[prompt] = True
    scaled = np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    bias = dict(params.logit_bias)
    shift = [params.shift(bias.get(token, 0.0), int(count)) for token, count in enumerate(counts)]
    return np.asarray(np.where(occurs, scaled, x) + np.array(shift), np.float32)


def sample(
    logits: NDArray[np.floating], params: SamplingParams, position: int, allowed: NDArray[np.bool_] | None = None
) -> int:
    """The token at an absolute position, given the logits of the token before it, after penalties and bias.

    logits: [V]; allowed: [V], True for tokens that may be sampled; by default all.
    """
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    if params.greedy:
        return int(np.argmax(logits))
    tokens = np.arange(len(logits))
    noisy = filtered_log_probs(logits, params) + noise.gumbel(params.seed, np.array([position]), tokens)[0]
    return int(np.argmax(noisy))
