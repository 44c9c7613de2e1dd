"""What the folder of an EAGLE-3 head says, as SpecForge and lmsys, AngelSlim and speculators publish it.

flags             at the top of config.json or in eagle_config
speculators       the layer's fields stand in transformer_layer_config; norm_before_residual is true by default;
                  layer ids name the layer that a state enters, elsewhere the one that it leaves
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_STATES = 3  # of the target, side by side


def plain_name(name: str) -> str:
    """A published tensor's name as readers know it: `layers.0.` for the first layer's, whatever it goes by."""
    name = re.sub("^(model\\.)?(midlayer\\.)?", lambda found: "layers.0." if found[2] else "", name)
    for i, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(old, f"fc_norm.{i}")
    return "norm_before_fc.weight" if name == "input_norm.weight" else name


def is_speculators(raw: dict[str, Any]) -> bool:
    """True for a config.json in that library's format."""
    return "transformer_layer_config" in raw


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """All keys of a config.json side by side, those at the top first, then those of eagle_config; null says nothing."""
    parts = raw.get("transformer_layer_config") or {}, raw.get("eagle_config") or {}, raw
    return {key: value for part in parts for key, value in part.items() if value is not None}


def layer_ids(flat_raw: dict[str, Any], *, speculators: bool) -> tuple[int, ...]:
    """The target's layers whose inputs are the states, ascending; empty if none are named."""
    ids = flat_raw.get("eagle_aux_hidden_state_layer_ids") or ()
    return tuple(sorted(int(i) + (0 if speculators else 1) for i in ids))


def target_ids(offsets: NDArray[np.integer], vocab: int) -> NDArray[np.int64] | None:
    """The target's id of each entry of a head, from its `d2t`; None if they do not ascend below the vocabulary."""
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    wrong = np.any(ids < 0) or np.any(ids >= vocab) or np.any(np.diff(ids) <= 0)
    return None if wrong else ids
