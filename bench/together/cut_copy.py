"""A small model for a target without training: the target itself with some of its middle layers left out."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_cut_copy(target: Path, folder: Path, left_out: Sequence[int]) -> None:
    """Write a checkpoint of one file again, without some of its layers."""
    config = json.loads((target / "config.json").read_text())
    kept = [layer for layer in range(config["num_hidden_layers"]) if layer not in left_out]
    number = {layer: place for place, layer in enumerate(kept)}
    tensors = {}
    with safe_open(target / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
            found = re.match(r"(model\.layers\.)(\d+)(\..*)", name)
            if found is None:
                tensors[name] = file.get_tensor(name)
            elif int(found[2]) in number:
                tensors[f"{found[1]}{number[int(found[2])]}{found[3]}"] = file.get_tensor(name)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}))
    for name in _FILES:
        if (target / name).is_file():
            shutil.copy(target / name, folder)
