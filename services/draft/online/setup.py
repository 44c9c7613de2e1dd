"""Builds the parts of online training around a head that is served."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from outrider.checkpoints import checkpoint
from outrider.checkpoints.disk import write_atomically
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, row_bytes
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint, target_logits
from services.draft.learning.algorithms.initial import published_head
from services.draft.learning.algorithms.llama_layers import plain
from services.draft.learning.algorithms.published import PublishedHead
from services.draft.learning.objective import TargetWeights
from services.draft.learning.records.vocabulary import draft_ids
from services.draft.model.params import Params
from services.draft.online.learner import Learner
from services.draft.online.options import OnlineOptions
from services.draft.online.replay_buffer import ReplayBuffer, min_bytes
from services.draft.online.state import load_state, save_state
from services.draft.online.swap import LearntWeights, ServedWeights, WeightFormat

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
    """Online training of a head, the learner's host. Call `serve` for the weights of the runner, then `learner`.

    shared: shapes of the target's tensors that serve or train the head, by name
    """

    def __init__(
        self, options: OnlineOptions, folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint, origin: Path,
        first: DraftCheckpoint,
    ) -> None:  # fmt: skip
        """folder: of the draft that is read; origin: of the original draft, `first`. Raises ConfigError."""
        self.options, self.head, self._target = options, published_head(folder, target, draft), target
        embedding = bool(draft.shared.keys() & target.shared(head=False).keys())
        self.shared = target.shared(embedding=embedding)  # the head computes what the target would have sampled
        self._learner: Learner | None = None
        self._output = Path(options.output).expanduser() if options.output else None
        fingerprint = checkpoint.fingerprint(origin)
        self._facts: dict[str, Any] = {"draft": fingerprint, "target": checkpoint.fingerprint(target.folder)}
        self._keep = weight_writer(self.head, self._output, fingerprint)
        self._learnt, self._first = self.head.params(), None
        if folder != origin:
            original = published_head(origin, target, first)
            self._first = LearntWeights(original.params(), original.target_ids(first.load(jnp.float32)))
        self._converted: tuple[Params, Params] | None = None
        width = len(self.head.states.layers) + 1  # states of the target
        row = row_bytes(width * target.hidden_size, FeatureFormat.BFLOAT16)
        least = min_bytes(row, options.length, options.held_out)
        if options.bytes < least:
            raise ConfigError(f"--online-bytes {options.bytes} is too small for this target; set {least} or more")
        self._facts |= {"row size": row, "segment length": options.length}
        self.buffer = ReplayBuffer(
            options.bytes, row, options.length, options.context, options.held_out, options.versions
        )

    def serve(self, params: Params, weight_format: WeightFormat) -> ServedWeights:
        """The weights of the runner. params: all parameters, as the service has them."""
        self._weight_format = weight_format
        self._frozen = self.untrained(params)
        return self.convert(LearntWeights(self._learnt, self.head.target_ids(self._frozen)))

    def untrained(self, params: Params) -> Params:
        """Those parameters that are not trained, the target's among them."""
        return {name: value for name, value in params.items() if name not in self._learnt}

    def learner(self, **options: Any) -> Learner:
        """The learner, with the state that a former process stored. options: as of Learner."""
        learnt = LearntWeights(self._learnt, self.head.target_ids(self._frozen))
        logits = target_logits(self._target)
        options = {"first": self._first, "logits": logits} | options
        self._learner = Learner(self.head, learnt, self, self.buffer, self.options, **options)
        if self._output is not None:
            load_state(self._output, self._learner, self._state_facts())
        return self._learner

    def follow(self, params: Params, target: TargetCheckpoint) -> ServedWeights:
        """Train and serve with a target's new weights, from any thread. Returns the weights to serve.

        params: with the new weights, as the service has them; only those that are not trained are used
        """
        assert self._learner is not None, "the service is built"
        with self._learner.swapping:
            self._frozen, self._target = self.untrained(params), target
            return self._learner.follow()

    # --- what the learner needs ---

    def targets(self, *vocabularies: NDArray[np.int64]) -> list[TargetWeights]:
        """The target's present weights for each vocabulary. Called after `serve`."""
        head = np.asarray(self._target.embedding_and_head(plain, embedding=False)["head"])
        embed = (
            # A tied head may be packed for products alone, which the embedding lookup cannot read.
            self._frozen["embed"]
            if "embed" in self._frozen
            else jnp.asarray(np.ascontiguousarray(head.T), jnp.bfloat16)
        )
        size = self._target.vocab_size
        return [
            TargetWeights(
                embed, jnp.asarray(np.ascontiguousarray(head[:, ids]), jnp.bfloat16), jnp.asarray(draft_ids(ids, size))
            )
            for ids in vocabularies
        ]

    def convert(self, learnt: LearntWeights, *, served: bool = True) -> ServedWeights:
        """Weights for the service. served: they will be; those that are already are not converted again."""
        if not served:
            converted = self._weight_format.converted(learnt.params)
        else:
            if self._converted is None or self._converted[0] is not learnt.params:
                self._converted = learnt.params, self._weight_format.converted(learnt.params)
            converted = dict(self._converted[1])
        fusion = converted.pop("fusion", {})
        if self.frozen_tokens() is not None:
            old = self._frozen["ids"]
            converted["ids"] = jax.device_put(learnt.ids.astype(old.dtype), old.sharding)
        return ServedWeights(self._frozen | converted, fusion)

    def keep(self, learnt: LearntWeights) -> None:
        """Store weights that are served from now on."""
        self._keep(learnt)

    def save(self, learner: Learner) -> None:
        """Store the state of the training beside the weights, if there is a folder for it."""
        if self._output is not None:
            save_state(self._output, learner, self._state_facts())

    def _state_facts(self) -> dict[str, Any]:
        assert self._output is not None
        written = (self._output / "model.safetensors").exists()
        return self._facts | {"weights": checkpoint.fingerprint(self._output) if written else ""}

    def frozen_tokens(self) -> set[int] | None:
        """Tokens that keep their entries; None for a head whose vocabulary is not its own."""
        own = "head" in self._learnt and "ids" in self._frozen
        return set(self._target.eos_token_ids) if own else None


def weight_writer(head: PublishedHead, folder: Path | None, origin: str) -> Callable[[LearntWeights], None]:
    """A function that writes weights into a folder, with the fingerprint of the draft that training began with.

    After a failed write, for example on a full disk, the previous files stay, and training goes on.
    """

    def write(learnt: LearntWeights) -> None:
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # First: weights without it would be taken for another draft's.
            write_atomically(folder / ORIGIN, origin + "\n")
            head.publish(jax.tree.map(np.asarray, learnt.params), learnt.ids, folder)
        except (OSError, SafetensorError) as error:
            log.warning(
                "the trained weights serve, but could not be written to %s: %s; free some space there, the next "
                "weights are written again", folder, error,
            )  # fmt: skip

    return write


ORIGIN = "origin.txt"
"""Name of the file with the fingerprint of the draft that training began with."""
