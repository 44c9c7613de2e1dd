"""Puts together what a head needs to learn while it is served."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, row_bytes
from services.draft.formats.base import Draft
from services.draft.formats.target import Target, target_logits
from services.draft.learning.algorithms.served import served_head
from services.draft.learning.objective import Shared
from services.draft.learning.vocabulary import draft_ids
from services.draft.model.layers.heads import Params
from services.draft.online.learner import ORIGIN, Learner, keeper
from services.draft.online.options import OnlineOptions
from services.draft.online.ring import Ring, least_bytes
from services.draft.online.swap import Form, Served

log = logging.getLogger(__name__)


def folder_to_serve(folder: Path, output: str | None) -> Path:
    """The draft's folder, or that of what was learnt from it already. Raises ConfigError if that is of another one."""
    if output is None or not (kept := Path(output).expanduser() / "model.safetensors").exists():
        return folder
    origin = kept.with_name(ORIGIN)
    if not origin.exists() or origin.read_text().strip() != checkpoint.fingerprint(folder):
        raise ConfigError(f"--online-output {output} holds another draft; name an empty folder")
    log.info("going on with what was learnt before, in %s", output)
    return kept.parent


class Teaching:
    """A head that is to learn. Use: `serve` for the weights that a runner is made of, then `learner`."""

    def __init__(self, options: OnlineOptions, folder: Path, target: Target, draft: Draft, origin: str) -> None:
        """folder: of the draft that is read; origin: fingerprint of the one that it began with. Raises ConfigError."""
        self.options, self.head, self._target = options, served_head(folder, target, draft), target
        if options.output and not self.head.whole:
            raise ConfigError("--online-output cannot keep MTP layers, which belong to the target's checkpoint")
        self._keep = keeper(self.head, Path(options.output).expanduser() if options.output else None, origin)
        self._learnt = self.head.params()
        width = len(self.head.states.layers) + 1  # states of the target
        row = row_bytes(width * target.hidden_size, FeatureFormat.BFLOAT16)
        least = least_bytes(row, options.length, options.held_out)
        if options.bytes < least:
            raise ConfigError(f"--online-bytes {options.bytes} cannot hold texts of this target; {least} can")
        self.ring = Ring(options.bytes, row, options.length, options.context, options.held_out)

    def serve(self, params: Params, form: Form) -> Served:
        """What a runner is made of. params: all that there are, as the service has them."""
        self._form = form
        self._kept = {name: value for name, value in params.items() if name not in self._learnt}
        return form.make(self._learnt, self._kept)

    def learner(self, **options: Any) -> Learner:
        """options: as of Learner."""
        return Learner(
            self.head, self._learnt, self._shared(), self.ring, self.options,
            lambda learnt: self._form.make(learnt, self._kept), self._keep, logits=target_logits(self._target),
            **options,
        )  # fmt: skip

    def _shared(self) -> Shared:
        ids = self.head.target_ids(self._kept)
        head = np.asarray(self._target.embedding_and_head(_plain, embedding=False)["head"])
        return Shared(
            # Where the target's head is its embedding, and is used as both, it may be laid out for products alone.
            self._kept["embed"] if "embed" in self._kept else jnp.asarray(np.ascontiguousarray(head.T), jnp.bfloat16),
            jnp.asarray(np.ascontiguousarray(head[:, ids]), jnp.bfloat16),
            jnp.asarray(draft_ids(ids, self._target.vocab_size)),
        )


def _plain(array: Any) -> jax.Array:
    """`Put` without a device."""
    return array.astype(np.float32)  # type: ignore[no-any-return]
