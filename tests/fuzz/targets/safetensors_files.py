"""Headers of safetensors files, and what is read from them alone: names, sizes, the fingerprint."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from pathlib import Path

from outrider.checkpoints import checkpoint
from outrider.checkpoints.drafts import has_mtp_layers, kind_of_draft
from outrider.checkpoints.sizes import CheckpointSizes
from outrider.errors import ConfigError
from services.draft.model.weights.tensors import Tensors
from tests.fuzz.choices import Choices, as_json

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
_KINDS = ("F32", "BF16", "F16", "I64", "F8_E4M3", "U8", "X", "")
_NAMES = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight", "mtp.fc.weight",
          "d2t", "model.layers.0.mlp.down_proj.qweight", "model.layers.0.mlp.down_proj.scales", "__metadata__",
          "")  # fmt: skip


def fuzz(data: bytes) -> None:
    """The first byte chooses whether the rest is a whole file, a header, or decisions about one."""
    choices, folder = Choices(data), Path(_FOLDER.name)
    raw = choices.below(3)
    (folder / "config.json").write_text('{"num_hidden_layers": 1, "hidden_size": 4, "vocab_size": 8}')
    content = choices.rest() if raw == 0 else _file(choices.rest()) if raw == 1 else _made(choices)
    (folder / "model.safetensors").write_bytes(content)
    for read in (_sizes, checkpoint.fingerprint, kind_of_draft, has_mtp_layers, _tensors):
        with contextlib.suppress(ConfigError):
            read(folder)


def seeds() -> list[bytes]:
    """A good file, a good header, decisions."""
    header = {"lm_head.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "__metadata__": {"a": "b"}}
    return [b"\0" + _file(json.dumps(header).encode()) + bytes(16), b"\1" + json.dumps(header).encode(), b"\2\1\1\1\1"]


def _file(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + bytes(64)


def _made(choices: Choices) -> bytes:
    header = {}
    for _ in range(choices.below(4)):
        entry = {
            "dtype": choices.one(_KINDS),
            "shape": choices.items(choices.integer, 3),
            "data_offsets": [choices.below(64), choices.integer()],
        }
        if choices.chance(6):
            entry[choices.one(tuple(entry))] = choices.value(2)
        header[choices.one(_NAMES)] = choices.value(2) if choices.chance(8) else entry
    return _file(as_json(header))


def _sizes(folder: Path) -> None:
    sizes = CheckpointSizes(folder)
    sizes.weights(2, "int8")
    sizes.mtp_weights(2)
    sizes.shared_weights(2, head=True)
    sizes.token_bytes(2)


def _tensors(folder: Path) -> None:
    with Tensors(folder) as tensors:
        for name in sorted(tensors.names):
            with contextlib.suppress(ConfigError):
                tensors.shape(name)
                tensors.read(name)
