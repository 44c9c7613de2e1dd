"""The result of every format reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.serving.features import FeatureSpec
from services.draft.model.layers.config import ModelConfig
from services.draft.model.params import Params


@dataclass(frozen=True)
class DraftCheckpoint:
    """A draft model whose configuration was read, but not its weights.

    load:     reads the parameters in a number format (a dtype of JAX). Raises ConfigError
    features: the hidden states of the target that it needs; None if it reads tokens alone
    fusion:   the layer that the target applies to them, as FeatureSpec describes it
    shared:   shapes of the tensors that are the target's, by their names in its checkpoint
    """

    config: ModelConfig
    load: Callable[[Any], Params]
    features: FeatureSpec | None = None
    fusion: bytes = b""
    shared: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
