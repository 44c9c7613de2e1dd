"""What a fed head shares with its target, its embedding and its head, taken anew when the target has new weights.

    a thread of its own   a folder is read, and the draft's parameters are made of it as they were at the start
    engine's thread       between two rounds they take the place of what there is, and prefixes of before go

They have the very shapes, formats and places of what they replace, so the same programs run on. Both are there for a
moment, on the device, too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from outrider.checkpoints import checkpoint
from outrider.paging.prefix import PrefixCache

if TYPE_CHECKING:  # JAX is not needed by drafters that share nothing
    from services.draft.model.layers.heads import Params
    from services.draft.model.programs.runner import Runner


class Shared(NamedTuple):
    """Parameters with what a folder shares. fingerprint: of the folder."""

    params: Params
    fingerprint: str


class SharesWeights(Protocol):
    """A drafter whose model has weights of the target's."""

    runner: Runner
    prefix: PrefixCache


class Sharing:
    """Takes weights of folders for one drafter."""

    def __init__(self, drafter: SharesWeights, folder: Path, load: Callable[[Path], Params]) -> None:
        """folder: where its present ones come from. load: the drafter's parameters with those of another folder."""
        self._drafter = drafter
        self._load = load
        self._fingerprint = checkpoint.fingerprint(folder)

    def read(self, path: str) -> Shared | None:
        """What a folder shares; None if the drafter has it already. Any thread may call. Raises ConfigError."""
        folder = checkpoint.resolve(path)
        fingerprint = checkpoint.fingerprint(folder)
        return Shared(self._load(folder), fingerprint) if fingerprint != self._fingerprint else None

    def take(self, shared: Shared) -> None:
        """In the engine's thread: compute with it from now on."""
        self._drafter.runner.install(shared.params)
        self._drafter.prefix.flush()
        self._fingerprint = shared.fingerprint
