"""Published heads from which training starts or goes on, by kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider.errors import ConfigError
from services.draft.formats import eagle, eagle3, mtp
from services.draft.formats.base import DraftCheckpoint
from services.draft.formats.target import TargetCheckpoint
from services.draft.learning.algorithms.published import PublishedEagle, PublishedEagle3, PublishedHead
from services.draft.learning.algorithms.published_mtp import PublishedMtp
from services.draft.model.layers.heads import Eagle3Head, EagleHead, ParallelHead


def published_head(folder: Path, target: TargetCheckpoint, draft: DraftCheckpoint) -> PublishedHead:
    """The head of a folder, to be trained further. draft: read from there. Raises ConfigError if it cannot be."""
    if isinstance(draft.config.head, ParallelHead):
        raise ConfigError(f"{folder} holds a P-EAGLE head, which is not trained further; name an EAGLE-3 head")
    kinds: dict[type, type[PublishedHead]] = {EagleHead: PublishedEagle, Eagle3Head: PublishedEagle3}
    return kinds.get(type(draft.config.head), PublishedMtp)(folder, target, draft)


def initial_head(algorithm: str, folder: Path, target: TargetCheckpoint) -> PublishedHead:
    """A published head from which a training run starts. Raises ConfigError if it cannot."""
    readers: dict[str, Callable[[Path, TargetCheckpoint], DraftCheckpoint]] = {
        "EAGLE": eagle.read_eagle, "EAGLE3": eagle3.read_eagle3, "NEXTN": mtp.read_mtp,
    }  # fmt: skip
    if algorithm not in readers:
        raise ConfigError(f"--initial is for {', '.join(readers)}; leave it out to train {algorithm} from nothing")
    return published_head(folder, target, readers[algorithm](folder, target))
