"""Rollouts as training data: prompts and answers as token ids, which the target does not write again.

A line is one of

    an answer of /generate, and its prompt    input_ids, output_ids, meta_info
    a sample of slime                         tokens, response_length

Without `input_ids` or `output_ids`, the tokens are read from the log-probabilities in `meta_info`. Rewards, masks and
log-probabilities are not read: the target computes its hidden states, and so its distributions, anew.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConfigError, Overloaded
from outrider.speculation.sampling import SamplingParams

KINDS = ("tokens", "input_ids", "output_ids", "meta_info")


@dataclass(frozen=True)
class Rollout:
    """Token ids, uint32 as bytes; the first ones are the prompt.

    first: index of the first token to learn; None for the one behind the prompt
    temperature, seed, held_out: of the answer, where its file knows them; None otherwise
    """

    content: bytes
    prompt: int
    first: int | None = None
    temperature: float | None = None
    seed: int | None = None
    held_out: bool | None = None

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """All token ids, [n]."""
        return np.frombuffer(self.content, np.uint32)


def is_rollout(line: Any) -> bool:
    """True for a line that has token ids."""
    return isinstance(line, dict) and any(kind in line for kind in KINDS)


def read_rollout(line: Mapping[str, Any], where: str) -> Rollout:
    """The rollout of a line. where: its file and number. Raises ConfigError."""
    if "tokens" in line:
        tokens, length = _ids(line["tokens"], where, "tokens"), line.get("response_length")
        if type(length) is not int or not 0 < length < len(tokens):
            raise ConfigError(f"{where}: response_length must be the number of answer tokens at the end of tokens")
        return Rollout(tokens.tobytes(), len(tokens) - length)
    info = line.get("meta_info")
    info = info if isinstance(info, dict) else {}
    prompt = _ids(_side(line, info, "input"), where, "input_ids")
    answer = _ids(_side(line, info, "output"), where, "output_ids")
    return Rollout(np.concatenate([prompt, answer]).tobytes(), len(prompt))


def _side(line: Mapping[str, Any], info: Mapping[str, Any], side: str) -> Any:
    """The token ids of one side; those of its log-probabilities if the line has no others."""
    if (found := line.get(f"{side}_ids")) is not None:
        return found
    found = info.get(f"{side}_token_logprobs")
    if side == "input" and isinstance(found, list) and len(found) != info.get("prompt_tokens", len(found)):
        return None  # only the end of the prompt was asked for
    if not isinstance(found, list) or not all(isinstance(one, list) and len(one) > 1 for one in found):
        return None
    return [one[1] for one in found]


def _ids(found: Any, where: str, name: str) -> NDArray[np.uint32]:
    if not isinstance(found, Sequence) or not found or not all(type(i) is int and 0 <= i < 1 << 31 for i in found):
        raise ConfigError(f"{where}: {name} must be a list of token ids that is not empty")
    return np.array(found, np.uint32)


Write = Callable[[list[int], SamplingParams, int], Awaitable[tuple[NDArray[np.uint32], NDArray[np.uint8]]]]


async def replay(rollout: Rollout, longest: int, write: Write) -> tuple[NDArray[np.uint32], NDArray[np.uint8]] | None:
    """Tokens [n] and the target's states of all but the last, [n - 1, row bytes]. Raises OutriderError.

    longest: tokens, beyond which an answer is cut; None without room for two of them. write: as of TargetClient
    """
    given = rollout.tokens[:longest]
    if len(given) < rollout.prompt + 2:
        return None
    # The states of a prompt's last chunk come with the token behind it, which a further one must follow.
    tokens, rows = await write(given.tolist(), SamplingParams(), 2)
    count = len(given)
    if len(rows) < count - 1:
        raise Overloaded("hidden states of a rollout were dropped on the way")
    return tokens[:count], rows[: count - 1]
