"""Which drafter reads a published checkpoint, from its configuration and the names of its tensors."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.checkpoints.checkpoint import load_json, weight_files
from outrider.checkpoints.config_json import load_config, values_of
from outrider.checkpoints.eagle3 import is_speculators
from outrider.checkpoints.headers import tensor_headers
from outrider.config import Algorithm
from outrider.errors import ConfigError

# The fusion layer of an MTP layer: DeepSeek-V3, GLM-4.5 and MiMo-V2; MiMo-7B; Qwen.
_MTP = re.compile(r"(^|\.)(eh_proj|mtp_layers\.\d+\.input_proj|mtp\.fc)\.weight$")
_EAGLE = re.compile(r"(^|\.)fc\.weight$")
_SHARDS = "model.safetensors.index.json"


def has_mtp_layers(folder: Path) -> bool:
    """True if a target's checkpoint holds MTP layers; False as well for a checkpoint that cannot be read."""
    try:
        return any(_MTP.search(name) for name in tensor_names(folder))
    except (ConfigError, OSError, ValueError):
        return False  # the target's own loading reports what is wrong


def kind_of_draft(folder: Path) -> Algorithm:
    """The algorithm of a draft model's folder. Raises ConfigError for files that cannot be read."""
    raw = load_config(folder)
    try:
        names = tensor_names(folder)
    except (ConfigError, OSError, ValueError):
        names = set()  # for example of torch.save: the configuration decides
    if any(_MTP.search(name) for name in names):
        return "NEXTN"
    with values_of(folder / "config.json"):
        architecture = str((raw.get("architectures") or [""])[0]).lower()
    if "dflash" in architecture or "dflash_config" in raw:
        return "DFLASH"
    if "eagle3" in architecture or "draft_vocab_size" in raw or is_speculators(raw):
        return "EAGLE3"
    if "eagle" in architecture or any(_EAGLE.search(name) for name in names):
        return "EAGLE"
    return "STANDALONE"


def tensor_names(folder: Path) -> set[str]:
    """The names of a checkpoint's tensors, from its index or the headers of its safetensors files.

    Raises ConfigError, OSError or ValueError for files that cannot be read.
    """
    if (folder / _SHARDS).is_file():
        with values_of(folder / _SHARDS):
            return set(load_json(folder / _SHARDS).get("weight_map") or {})
    names: set[str] = set()
    for file in weight_files(folder):
        names |= tensor_headers(file).keys()
    return names
