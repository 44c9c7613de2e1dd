"""The samples of a step: launched on the device, then read once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.speculation.proposal import Logprobs
from services.target.sampling import sampler
from services.target.sampling.logprobs import Scores
from services.target.sampling.session import TargetSession
from services.target.step.download import Download
from services.target.step.programs import LoopIteration


@dataclass(frozen=True)
class StepSamples:
    """The samples of a step.

    tokens:  [R], after each root and its nodes, session by session; [steps * R] with multi-step decoding; the committed
             tokens of a fused speculation loop
    scores:  log-probabilities; firsts: for each session that asked for them, its first row in scores
    redrawn: [R] bool, rows that were sampled again, so that the device used another token at first; None for none
    moved:   True if the rows of accepted nodes have moved in the cache already, up to a node that was sampled again
    steps:   more than one with multi-step decoding
    iterations: of a fused speculation loop
    """

    tokens: NDArray[np.int64]
    scores: Scores | None = None
    firsts: Mapping[int, int] = field(default_factory=dict)
    redrawn: NDArray[np.bool_] | None = None
    moved: bool = False
    steps: int = 1
    iterations: Sequence[LoopIteration] = ()

    @property
    def seen(self) -> NDArray[np.int64]:
        """The samples that the device used. [R]."""
        return self.tokens if self.redrawn is None else np.where(self.redrawn, sampler.UNRESOLVED, self.tokens)

    @property
    def model_steps(self) -> int:
        """Number of steps of the model."""
        return len(self.iterations) or self.steps

    def of(self, first: int, stop: int) -> NDArray[np.int64]:
        """The samples of rows first .. stop - 1: after a root and each node, or after a root in each step."""
        return self.tokens[first:stop] if self.steps == 1 else self.tokens[first :: len(self.tokens) // self.steps]

    def logprobs(self, entry: TargetSession, path: Sequence[int], count: int) -> Logprobs | None:
        """Log-probabilities of the first `count` tokens that a session is about to commit along its accepted path."""
        session = entry.session
        if self.scores is None or entry.top is None:
            return None
        first = self.firsts[session.id]
        rows = [first, *(first + node + 1 for node in path)][:count]
        return self.scores.logprobs(session.length, rows, entry.top)


@dataclass
class ScoredRows:
    """Log-probabilities of new tokens, on the device; firsts as in StepSamples."""

    scores: Scores
    firsts: Mapping[int, int]


class LaunchedStep:
    """A step that was launched on the device; its samples can be read once."""

    def __init__(
        self,
        tokens: Tensor | NDArray[np.int64],
        scored: ScoredRows | None = None,
        prompts: tuple[Scores, Callable[[Scores], None]] | None = None,
        resample: Callable[[], Tensor] | None = None,
        steps: int = 1,
        iterations: Sequence[LoopIteration] = (),
    ) -> None:
        """tokens: [R], UNRESOLVED where `resample` must sample again; prompts: scores, and a function that stores them.

        steps, iterations: as in StepSamples.
        """
        self.steps, self.iterations = steps, iterations
        self.tokens = torch.from_numpy(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.moved = False
        self._scored, self._prompts, self._resample = scored, prompts, resample
        self._here = tokens if isinstance(tokens, np.ndarray) and not scored and not prompts else None
        if self._here is not None:
            return
        scores = [part for part in (scored and scored.scores, prompts and prompts[0]) if part]
        self._download = Download([self.tokens, *(tensor for part in scores for tensor in part)])

    def read(self) -> StepSamples:
        """The samples. Waits for this step, once, or a second time if rows must be sampled again."""
        return (
            self._download_samples()
            if self._here is None
            else StepSamples(self._here, steps=self.steps, iterations=self.iterations)
        )

    @torch.inference_mode()
    def _download_samples(self) -> StepSamples:
        tensors = self._download.read()
        tokens: NDArray[np.int64] = np.asarray(tensors.pop(0).numpy())
        scores = Scores(*(tensors.pop(0) for _ in range(3))) if self._scored else None
        if self._prompts is not None:
            self._prompts[1](Scores(*tensors))
        redrawn = None
        if self._resample is not None and (tokens == sampler.UNRESOLVED).any():
            redrawn, tokens = tokens == sampler.UNRESOLVED, self._resample().cpu().numpy()
        return StepSamples(tokens, scores, self._scored.firsts if self._scored else {}, redrawn, self.moved)
