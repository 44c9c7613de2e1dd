"""The weights that a feature-based head shares with its target, loaded again when the target has new weights.

    a separate thread     loads the target's embedding and head, and makes the draft's parameters as at the start
    the engine's thread   installs them between two steps, and drops cached prefixes

The new parameters have the shapes, formats and placement of the old ones, so the same programs run on. For a moment
both are on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from outrider.paging.prefix import PrefixCache

if TYPE_CHECKING:  # drafters without a model do not import JAX
    from services.draft.model.params import Params
    from services.draft.model.programs.runner import ModelRunner


class LoadedWeights(NamedTuple):
    """Parameters with the weights of a folder. fingerprint: of the folder."""

    params: Params
    fingerprint: str


class SharesTargetWeights(Protocol):
    """A drafter whose model has weights of the target."""

    runner: ModelRunner
    prefix: PrefixCache


class SharedWeights:
    """Loads and installs the target's weights for one drafter."""

    def __init__(self, drafter: SharesTargetWeights, folder: Path, read: Callable[[Path], Params]) -> None:
        """folder: source of the present weights. read: the drafter's parameters with those of another folder."""
        self._drafter = drafter
        self._read = read
        self._fingerprint = checkpoint.fingerprint(folder)

    def load(self, path: str) -> LoadedWeights | None:
        """Load a folder's weights; None if they are installed. Called from any thread. Raises ConfigError."""
        if not Path(path).is_dir():  # not a name on the hub, whatever a peer sends
            raise ConfigError(f"there is no folder {path} on this machine")
        folder = checkpoint.resolve(path)
        fingerprint = checkpoint.fingerprint(folder)
        return LoadedWeights(self._read(folder), fingerprint) if fingerprint != self._fingerprint else None

    def install(self, weights: LoadedWeights) -> None:
        """Compute with other weights from now on. Called from the engine's thread."""
        self._drafter.runner.install(weights.params)
        self._drafter.prefix.flush()
        self._fingerprint = weights.fingerprint
