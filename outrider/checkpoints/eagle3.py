"""Configuration and tensor names of EAGLE-3 heads as published by SpecForge and lmsys, AngelSlim and speculators.

flags             at the top of config.json or in eagle_config
speculators       the layer's fields are in transformer_layer_config; norm_before_residual defaults to true; a layer id
                  is that of the layer that reads the state, elsewhere that of the layer that writes it
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor, which all processes wait for, does without NumPy
    import numpy as np
    from numpy.typing import NDArray

DEFAULT_STATES = 3  # hidden states of the target, concatenated


def plain_name(name: str) -> str:
    """The common name of a published tensor: the head's layer is always `layers.0.`."""
    name = re.sub("^(model\\.)?(midlayer\\.)?", lambda found: "layers.0." if found[2] else "", name)
    for i, old in enumerate(("aux_norm_low", "aux_norm_mid", "aux_norm_high")):
        name = name.replace(old, f"fc_norm.{i}")
    return "norm_before_fc.weight" if name == "input_norm.weight" else name


def is_speculators(raw: dict[str, Any]) -> bool:
    """True for a config.json in the format of the library speculators."""
    return "transformer_layer_config" in raw


def flat(raw: dict[str, Any]) -> dict[str, Any]:
    """All keys of a config.json in one dict: top-level keys override those of eagle_config; null values are dropped."""
    parts = raw.get("transformer_layer_config") or {}, raw.get("eagle_config") or {}, raw
    return {key: value for part in parts for key, value in part.items() if value is not None}


def layer_ids(flat_raw: dict[str, Any], *, speculators: bool) -> tuple[int, ...]:
    """The target's layers whose inputs are the states, ascending; empty if the configuration has none."""
    ids = flat_raw.get("eagle_aux_hidden_state_layer_ids") or ()
    return tuple(sorted(int(i) + (0 if speculators else 1) for i in ids))


def target_ids(offsets: NDArray[np.integer], vocab: int) -> NDArray[np.int64] | None:
    """The target's token id of each entry of a head's vocabulary. offsets: `d2t`. vocab: the target's size.

    Returns None if the ids are out of range or do not ascend.
    """
    import numpy as np

    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    wrong = np.any(ids < 0) or np.any(ids >= vocab) or np.any(np.diff(ids) <= 0)
    return None if wrong else ids
