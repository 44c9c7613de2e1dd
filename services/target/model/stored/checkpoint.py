"""The weights of a dense decoder from a quantized checkpoint: kept in their width where a number format holds them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
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
_METHODS = ("gptq", "awq", "compressed-tensors", "fp8")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # meaningless without their scales
_CACHE_SCALES = (".k_scale", ".v_scale")  # of a KV cache in 8 bits, which is not scaled here


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
        kinds: dict[str, str] = {}
        for name, parts in self._quantized.items():
            weight = self._weight(name)
            for part in parts.values():
                self._found.pop(part)
            self._found[name] = weight.shape
            if (held := how_held(weight)) is not None:
                self._formats[name], self._bits[name] = held, weight.bits or 8
                kinds[name] = f"{stored['quant_method']} {f'int{weight.bits}' if weight.bits else 'e4m3'}"
        self.kinds: Mapping[str, str] = kinds

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
        unused = {_HEAD} - self._expected.keys()  # some checkpoints hold a tied head, too
        unused |= {name for name in self._found if name.endswith(_CACHE_SCALES)}
        return {name: shape for name, shape in self._found.items() if name not in unused} == self._expected

    def _weight(self, name: str) -> Quantized:
        try:
            return stored_weight(self._arrays(name, codes_of), self._stored)
        except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
            raise ConfigError(f"the tensors of {name} do not have the layout of their format: {error}") from None

    def _arrays(self, name: str, read: Callable[[Tensor], NDArray[Any]]) -> dict[str, NDArray[Any]]:
        parts = self._quantized.get(name, {"weight": name})
        return {suffix: read(self._tensor(part)) for suffix, part in parts.items()}

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
        try:
            pack_held(self._weight(name), self._formats[name], packed, outputs)
        except ValueError as error:
            raise ConfigError(f"{name} {error}; get the checkpoint whole") from None

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """As of the interface."""
        return self.plain(name)[begin:end]

    def plain(self, name: str) -> Tensor:
        """As of the interface. The weight that was read last stays in memory, for its further rows."""
        if self._widened is None or self._widened[0] != name:
            if name in self._quantized or self._tensor(name).dtype in FLOAT8:
                numbers = torch.from_numpy(dequantize(name, self._arrays(name, array_of), self._stored))
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


def codes_of(tensor: Tensor) -> NDArray[Any]:
    """As `array_of`, but of E4M3 the stored bytes, which no other tensor of a layer has."""
    return tensor.view(torch.uint8).numpy() if tensor.dtype == FLOAT8[0] else array_of(tensor)


def array_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor as a NumPy array; bfloat16 and fp8, which NumPy lacks, become float32."""
    known = not tensor.is_floating_point() or tensor.dtype in (torch.float16, torch.float32)
    return (tensor if known else tensor.float()).cpu().numpy()
