"""The weights of a dense decoder from a quantized checkpoint: kept in their width where a number format holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from outrider.checkpoints import checkpoint
from outrider.checkpoints.dequantize import BESIDE, INSTEAD, Quantized, dequantize, stored_weight
from outrider.checkpoints.headers import tensor_headers
from outrider.errors import ConfigError
from services.target.kernels.cpu.matrices.weights import PackedWeight
from services.target.model.stored.held import how_held, pack_held
from services.target.model.stored.source import StoredFormat

_PARTS = {*INSTEAD, *BESIDE}
_HEAD = "lm_head.weight"
_METHODS = ("gptq", "awq", "compressed-tensors")


class QuantizedWeights:
    """The weights of a folder, as a `WeightSource`. kinds: of the weights that are kept, by name."""

    def __init__(self, folder: Path, module: Any, stored: Mapping[str, Any]) -> None:
        """module: the model, without weights. stored: `quantization_config` of the checkpoint. Raises ConfigError for
        tensors that are not of their format.
        """
        self._dtype, self._stored = module.dtype, stored
        self._files: dict[str, Path] = {}
        self._found: dict[str, tuple[int, ...]] = {}  # shapes, of quantized weights once they are plain
        for file in checkpoint.weight_files(folder):
            entries = tensor_headers(file)
            self._files |= dict.fromkeys(entries, file)
            self._found |= {name: entry.shape for name, entry in entries.items()}
        self._expected = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}
        self._opened: dict[Path, Any] = {}
        self._widened: tuple[str, Tensor] | None = None
        self._formats: dict[str, StoredFormat] = {}
        self._bits: dict[str, int] = {}
        for name, parts in self._quantized.items():
            weight = self._weight(name)
            for part in parts.values():
                self._found.pop(part)
            self._found[name] = weight.shape
            if (held := how_held(weight)) is not None:
                self._formats[name], self._bits[name] = held, weight.bits
        method = stored["quant_method"]
        self.kinds: Mapping[str, str] = {name: f"{method} int{bits}" for name, bits in self._bits.items()}

    @cached_property
    def _quantized(self) -> dict[str, dict[str, str]]:
        """The stored tensors of each quantized weight by the suffix behind the layer's name, by the weight's name."""
        layers: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._files:
            layer, _, suffix = name.rpartition(".")
            if suffix in _PARTS or suffix == "weight":
                layers[f"{layer}.weight"][suffix] = name
        return {name: parts for name, parts in layers.items() if set(parts) - {"weight"}}

    def complete(self) -> bool:
        """True if the checkpoint has the model's tensors and no others, as `transformers` names them."""
        tied = {_HEAD} - self._expected.keys()  # some checkpoints hold a tied head, too
        return {name: shape for name, shape in self._found.items() if name not in tied} == self._expected

    def _weight(self, name: str) -> Quantized:
        try:
            return stored_weight(self._arrays(name), self._stored)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(f"the tensors of {name} do not have the layout of their format: {error}") from None

    def _arrays(self, name: str) -> dict[str, NDArray[Any]]:
        return {suffix: array_of(self._tensor(part)) for suffix, part in self._quantized[name].items()}

    def _tensor(self, name: str) -> Tensor:
        file = self._files[name]
        if file not in self._opened:
            self._opened[file] = safe_open(file, "pt")
        tensor: Tensor = self._opened[file].get_tensor(name)
        return tensor

    def number_format(self, name: str) -> StoredFormat | None:
        """As of the interface."""
        return self._formats.get(name)

    def bits(self, name: str) -> float:
        """As of the interface."""
        return float(self._bits.get(name, 8 * self._dtype.itemsize))

    def pack(self, name: str, packed: PackedWeight, outputs: Tensor) -> None:
        """As of the interface."""
        pack_held(self._weight(name), self._formats[name], packed, outputs)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """As of the interface."""
        return self.plain(name)[begin:end]

    def plain(self, name: str) -> Tensor:
        """As of the interface. The weight that was read last stays in memory, for its further rows."""
        if self._widened is None or self._widened[0] != name:
            if name in self._quantized:
                numbers = torch.from_numpy(dequantize(name, self._arrays(name), self._stored))
            else:
                numbers = self._tensor(name)
            self._widened = name, numbers.to(self._dtype)
        return self._widened[1]

    def release(self, _: Any) -> None:
        """The weight is packed."""
        self._widened = None


def supports(stored: Mapping[str, Any]) -> bool:
    """True for a `quantization_config` of a format whose integers may be kept."""
    return str(stored.get("quant_method", "")).lower() in _METHODS


def array_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor as a NumPy array; bfloat16 and fp8, which NumPy lacks, become float32."""
    known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32)
    return (tensor if known else tensor.float()).cpu().numpy()
