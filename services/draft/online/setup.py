"""Builds the parts of online training around a head that is served."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, row_bytes
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint, target_logits
from services.draft.learning.algorithms.initial import published_head
from services.draft.learning.algorithms.llama_layers import plain
from services.draft.learning.objective import TargetWeights
from services.draft.learning.vocabulary import draft_ids
from services.draft.model.params import Params
from services.draft.online.learner import ORIGIN, Learner, weight_writer
from services.draft.online.options import OnlineOptions
from services.draft.online.replay_buffer import ReplayBuffer, min_bytes
from services.draft.online.swap import ServedWeights, WeightFormat

log = logging.getLogger(__name__)


def folder_to_serve(folder: Path, output: str | None) -> Path:
    """The draft's folder, or that of its trained successor. Raises ConfigError if the latter is of another draft."""
    if output is None or not (kept := Path(output).expanduser() / "model.safetensors").exists():
        return folder
    origin = kept.with_name(ORIGIN)
    if not origin.exists() or origin.read_text().strip() != checkpoint.fingerprint(folder):
        raise ConfigError(f"--online-output {output} holds another draft; name an empty folder")
    log.info("resuming from the weights in %s", output)
    return kept.parent


class OnlineSetup:
    """Online training of a head. Call `serve` for the weights of the runner, then `learner`.

    learnt: the trained parameters as they were published, float32
    shared: shapes of the target's tensors that serve or train the head, by name
    """

    def __init__(
        self, options: OnlineOptions, folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint, origin: str
    ) -> None:
        """folder: of the draft that is read; origin: fingerprint of the original draft. Raises ConfigError."""
        self.options, self.head, self._target = options, published_head(folder, target, draft), target
        embedding = bool(draft.shared.keys() & target.shared(head=False).keys())
        self.shared = target.shared(embedding=embedding)  # the head computes what the target would have sampled
        self._learner: Learner | None = None
        self._keep = weight_writer(self.head, Path(options.output).expanduser() if options.output else None, origin)
        self.learnt = self.head.params()
        width = len(self.head.states.layers) + 1  # states of the target
        row = row_bytes(width * target.hidden_size, FeatureFormat.BFLOAT16)
        least = min_bytes(row, options.length, options.held_out)
        if options.bytes < least:
            raise ConfigError(f"--online-bytes {options.bytes} is too small for this target; set {least} or more")
        self.buffer = ReplayBuffer(options.bytes, row, options.length, options.context, options.held_out)

    def serve(self, params: Params, weight_format: WeightFormat) -> ServedWeights:
        """The weights of the runner. params: all parameters, as the service has them."""
        self._weight_format = weight_format
        self._frozen = {name: value for name, value in params.items() if name not in self.learnt}
        return weight_format.convert(self.learnt, self._frozen)

    def learner(self, **options: Any) -> Learner:
        """options: as of Learner."""

        def convert(learnt: Params) -> ServedWeights:
            return self._weight_format.convert(learnt, self._frozen)

        self._learner = Learner(
            self.head, self.learnt, self.target_weights(), self.buffer, self.options, convert, self._keep,
            logits=target_logits(self._target), **options,
        )  # fmt: skip
        return self._learner

    def follow(self, params: Params, target: TargetCheckpoint) -> ServedWeights:
        """Train and serve with a target's new weights, from any thread. Returns the weights to serve.

        params: all parameters with the new weights, as the service has them; only those that are not trained are used
        """
        assert self._learner is not None, "the service is built"
        with self._learner.swapping:
            self._frozen = {name: value for name, value in params.items() if name not in self.learnt}
            self._target = target
            return self._learner.follow(self.target_weights())

    def target_weights(self) -> TargetWeights:
        """The frozen weights of the target. Called after `serve`."""
        ids = self.head.target_ids(self._frozen)
        head = np.asarray(self._target.embedding_and_head(plain, embedding=False)["head"])
        return TargetWeights(
            # A tied head may be packed for products alone, which the embedding lookup cannot read.
            self._frozen["embed"]
            if "embed" in self._frozen
            else jnp.asarray(np.ascontiguousarray(head.T), jnp.bfloat16),
            jnp.asarray(np.ascontiguousarray(head[:, ids]), jnp.bfloat16),
            jnp.asarray(draft_ids(ids, self._target.vocab_size)),
        )
