"""What every reader of a format hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.serving.features import FeatureSpec
from services.draft.model.layers.config import ModelConfig
from services.draft.model.layers.heads import Params


@dataclass(frozen=True)
class Draft:
    """A draft model that has been read but for its weights.

    load:     the parameters in a number format (a dtype of JAX). Raises ConfigError
    features: what it wants of the target; None if it is not fed
    fusion:   what the target applies to them, as FeatureSpec describes it
    shares:   embedding or head are the target's
    """

    config: ModelConfig
    load: Callable[[Any], Params]
    features: FeatureSpec | None = None
    fusion: bytes = b""
    shares: bool = False
