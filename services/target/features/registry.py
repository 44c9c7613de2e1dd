"""The feature specifications that drafters have configured, each with its fusion."""

from __future__ import annotations

import logging
from collections import Counter

from outrider.serving.features import FeatureSpec
from services.target.features.fusion import Fusion
from services.target.model.base import Model

log = logging.getLogger(__name__)

_MAX_SPECS = 8


class FusionRegistry:
    """Fusions by specification id, in order of last use. users: number of open sessions of each fusion in use."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.fusions: dict[int, Fusion] = {}
        self.users: Counter[Fusion] = Counter()

    def configure(self, spec_id: int, spec: FeatureSpec, content: bytes) -> Fusion:
        """Register a specification. content: its fusion as a safetensors file, or empty. Raises ConfigError."""
        if spec_id not in self.fusions:
            self._evict_unused()
            self.fusions[spec_id] = fusion = Fusion(spec, content, self._model)
            log.info(
                "features of layers %s%s: %d numbers, %d bytes a token", list(fusion.layers),
                " and the end" if fusion.final else "", fusion.width, fusion.row_bytes,
            )  # fmt: skip
        return self._touch(spec_id)

    @property
    def latest(self) -> int:
        """The specification used last; 0 if there is none."""
        return next(reversed(self.fusions), 0)

    def acquire(self, spec_id: int) -> Fusion:
        """The fusion of a known specification, for one more session."""
        fusion = self._touch(spec_id)
        self.users[fusion] += 1
        return fusion

    def release(self, fusion: Fusion) -> None:
        """A session of this fusion has ended."""
        self.users[fusion] -= 1
        if not self.users[fusion]:
            del self.users[fusion]

    def _touch(self, spec_id: int) -> Fusion:
        self.fusions[spec_id] = fusion = self.fusions.pop(spec_id)
        return fusion

    def _evict_unused(self) -> None:
        """Limit the number of specifications: each new version of a drafter leaves its previous one behind."""
        unused = [name for name, fusion in self.fusions.items() if fusion not in self.users]
        for name in unused[: max(0, len(self.fusions) - _MAX_SPECS + 1)]:
            del self.fusions[name]
