"""Sizes of a checkpoint's weights and of a token in the KV cache, from config.json and the headers of its files.

No tensor is read, so the sizes of large checkpoints are known at once. They are estimates for planning memory: the
services measure what they have loaded.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from outrider.checkpoints import checkpoint
from outrider.checkpoints.config_json import load_config
from outrider.checkpoints.gguf.record import GgufRecord, read_record
from outrider.checkpoints.headers import tensor_headers

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of a number, by --dtype
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "U16": 2, "U32": 4}  # others: 1 byte
_FLOATS = ("F64", "F32", "F16", "BF16")
# Bytes of a weight by --quantization; int4 has a scale and a center for each 32 weights.
_QUANTIZED = {"int8": 1.0, "fp8": 1.0, "int4": 0.625}
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
# Tensors of multi-token prediction layers that are no numbered layers behind the model's own.
_MTP_NAME = re.compile(r"^(model\.)?mtp(_layers)?\.")
_EMBEDDING = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD = re.compile(r"(?:^|\.)lm_head\.weight$")


def is_mtp_tensor(name: str, layers: int, mtp_layers: int) -> bool:
    """True for a tensor of a multi-token prediction layer. layers: of the model itself; mtp_layers: behind them."""
    number = _LAYER_NUMBER.search(name)
    behind = number is not None and layers <= int(number[1]) < layers + max(mtp_layers, 1)
    return behind or _MTP_NAME.search(name) is not None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weight file. kind: its number format, as the header has it."""

    kind: str
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    def loaded_bytes(self, itemsize: int | None, quantization: str | None = None) -> int:
        """Bytes once loaded. itemsize: of the computation, in which floats are kept; None keeps those of the file."""
        if quantization in _QUANTIZED and self.kind in _FLOATS and len(self.shape) == 2:
            return int(self.numbers * _QUANTIZED[quantization])
        floats = itemsize is not None and self.kind in _FLOATS
        return self.numbers * (itemsize if floats and itemsize is not None else _STORED.get(self.kind, 1))


class ModelSizes(ABC):
    """Sizes of a model, from its configuration and the shapes of its tensors."""

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """config.json, of the text model."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name."""

    @property
    def file_bytes(self) -> int | None:
        """Bytes of the weights as a GGUF file has them, if they can be read from one; None for other checkpoints."""
        return None

    @property
    def itemsize(self) -> int | None:
        """Bytes of a number in the checkpoint's own format, if config.json names one."""
        return ITEMSIZES.get(str(self.config.get("dtype") or self.config.get("torch_dtype")))

    @property
    def layers(self) -> int:
        """Layers of the model itself."""
        return int(self.config.get("num_hidden_layers") or self.config.get("n_layer") or 1)

    @property
    def hidden(self) -> int:
        """Width of a hidden state."""
        return int(self.config.get("hidden_size") or self.config.get("n_embd") or 0)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return int(self.config.get("vocab_size") or 0)

    @property
    def context(self) -> int:
        """Positions of the model."""
        return int(self.config.get("max_position_embeddings") or self.config.get("n_positions") or 2048)

    def weights(self, itemsize: int | None = None, quantization: str | None = None) -> int:
        """Bytes of the model's own weights, once loaded. itemsize: default the checkpoint's."""
        return self._bytes(itemsize, quantization, mtp=False)

    def mtp_weights(self, itemsize: int | None = None, quantization: str | None = None) -> int:
        """Bytes of its multi-token prediction layers."""
        return self._bytes(itemsize, quantization, mtp=True)

    def shared_weights(self, itemsize: int, *, head: bool) -> int:
        """Bytes of the embedding, and of the output layer, that a feature-based draft copies from this checkpoint."""
        rows = self.vocab * self.hidden
        sizes = dict.fromkeys((_EMBEDDING, _HEAD), rows)
        for name, tensor in self.tensors.items():
            for pattern in sizes:
                if pattern.search(name) and not self._is_mtp(name):
                    sizes[pattern] = tensor.numbers
        return itemsize * (sizes[_EMBEDDING] + (sizes[_HEAD] if head else 0))

    @property
    def latent(self) -> bool:
        """True if the model has latent attention, whose cache all heads share."""
        return bool(self.config.get("kv_lora_rank"))

    def token_bytes(self, itemsize: int, layers: int | None = None) -> int:
        """Bytes of a token in the KV cache, of latent attention the latents. layers: default all."""
        config, count = self.config, self.layers if layers is None else layers
        heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
        if config.get("kv_lora_rank"):
            rotary = int(config.get("qk_rope_head_dim") or 0)
            return count * itemsize * (int(config["kv_lora_rank"]) + rotary)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        dim = int(config.get("head_dim") or self.hidden // heads)
        return count * itemsize * kv_heads * 2 * dim

    def _is_mtp(self, name: str) -> bool:
        return is_mtp_tensor(name, self.layers, int(self.config.get("num_nextn_predict_layers") or 0))

    def _bytes(self, itemsize: int | None, quantization: str | None, *, mtp: bool) -> int:
        itemsize = itemsize or self.itemsize
        total = 0
        for name, tensor in self.tensors.items():
            if self._is_mtp(name) == mtp:
                kept = _EMBEDDING.search(name) or _HEAD.search(name)  # quantization leaves them as they are
                total += tensor.loaded_bytes(itemsize, None if kept else quantization)
        return total


@dataclass(frozen=True)
class CheckpointSizes(ModelSizes):
    """Sizes of a folder with config.json and safetensors or pickled weights."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, of the text model."""
        raw = load_config(self.folder)
        text: dict[str, Any] = raw.get("text_config") or raw
        return {"torch_dtype": raw.get("torch_dtype"), "dtype": raw.get("dtype")} | text

    @cached_property
    def _record(self) -> GgufRecord | None:
        return read_record(self.folder)

    @property
    def file_bytes(self) -> int | None:
        """Bytes of the weights in a GGUF file, of a folder that describes one."""
        return None if self._record is None else sum(tensor.bytes for tensor in self._record.tensors.values())

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by name; a pickled file counts as one tensor of 16-bit numbers with the file's name.

        Of a GGUF file, with llama.cpp's names, they count as 16-bit numbers, too: what they are once widened.
        """
        found: dict[str, StoredTensor] = {}
        if self._record is not None:
            return {name: StoredTensor("BF16", tensor.shape) for name, tensor in self._record.tensors.items()}
        for file in checkpoint.weight_files(self.folder, torch_files=True):
            if file.suffix == ".safetensors":
                found |= _header(file)
            else:
                found[file.name] = StoredTensor("F16", (file.stat().st_size // 2, 1))
        return found


def _header(file: Path) -> dict[str, StoredTensor]:
    return {name: StoredTensor(entry.dtype, entry.shape) for name, entry in tensor_headers(file).items()}
