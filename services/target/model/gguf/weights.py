"""The weights of a dense decoder, read from its GGUF file. The file is mapped, and each tensor is read once.

llama.cpp's converter changes some tensors: Llama's queries and keys have the two halves of a head alternating, and the
weights of Gemma's norms are larger by 1.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from outrider.checkpoints.gguf.record import GgufRecord, GgufTensor
from outrider.checkpoints.headers import some_names
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu.matrices.weights import PackedWeight, stored_format
from services.target.model.stored.source import StoredFormat, parts_of

log = logging.getLogger(__name__)

_ALTERNATING = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")
_SHIFTED_NORMS = ("gemma2", "gemma3")  # architectures
# Tensors that are read into the configuration, and a head where the embedding is the head in any case.
_FACTS = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight", "output.weight"}
_THREAD_NUMBERS = 1 << 18  # least numbers for which a thread pays
Bytes = NDArray[np.uint8]


def open_gguf(record: GgufRecord, module: Any, config: TargetConfig) -> GgufWeights:
    """The weights of a GGUF file, whose number formats are kept unless flags ask for others. Raises ConfigError."""
    kept = config.dtype == "auto" and config.quantization is None
    log.info("reading %s%s", record.file, "" if kept else f" as {str(module.dtype).removeprefix('torch.')}")
    return GgufWeights(record, module, kept=kept)


class GgufWeights:
    """The weights in a GGUF file, as a `WeightSource`.

    kinds: types of the weights that are kept, by name; empty if all are widened
    """

    def __init__(self, record: GgufRecord, module: Any, *, kept: bool) -> None:
        """module: the model, whose parameters may be on the meta device. kept: keep the file's number formats.

        Raises ConfigError if the file and the model do not have the same tensors, or the file is not as recorded.
        """
        record.check()
        self._record, self._dtype, self._kept = record, module.dtype, kept
        heads = module.config.num_attention_heads
        self._heads = {"q": heads, "k": getattr(module.config, "num_key_value_heads", None) or heads}
        self._tensors = _assigned(record, module)
        self._bytes: Bytes = np.asarray(np.memmap(record.file, np.uint8, mode="c"))  # a private map, never written
        self.kinds: Mapping[str, str] = {
            name: tensor.kind for name, tensor in self._tensors.items() if self.number_format(name) is not None
        }

    def number_format(self, name: str) -> StoredFormat | None:
        """As of the interface."""
        tensor = self._tensors[name]
        found = stored_format(tensor.kind) if self._kept and len(tensor.shape) == 2 else None
        return None if found is None else StoredFormat(found)

    def bits(self, name: str) -> float:
        """As of the interface."""
        tensor = self._tensors[name]
        return 8.0 * (self._dtype.itemsize if self.number_format(name) is None else tensor.bytes / tensor.numbers)

    def pack(self, name: str, packed: PackedWeight, outputs: Tensor) -> None:
        """As of the interface."""
        places = self._places(name)
        packed.fill_stored(
            outputs if places is None else outputs[places], torch.from_numpy(self._raw(name)), self._tensors[name].kind
        )

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """As of the interface."""
        places = self._places(name)
        if places is None:
            return self._widened(name, slice(begin, end)).to(self._dtype)
        order = torch.argsort(places)[begin:end]  # of the rows in the file
        return self._widened(name, order.numpy()).to(self._dtype)

    def plain(self, name: str) -> Tensor:
        """As of the interface. Tensors of one dimension stay float32 where the file's formats are kept."""
        shape = self._tensors[name].shape
        if len(shape) == 2:
            whole = torch.empty(shape, dtype=self._dtype)
            for begin, end in parts_of(*shape):
                whole[begin:end] = self.rows(name, begin, end)
            return whole
        places = self._places(name)
        numbers = self._widened(name, slice(None) if places is None else torch.argsort(places).numpy())
        if name.endswith("norm.weight") and self._record.architecture in _SHIFTED_NORMS:
            numbers = numbers - 1
        return numbers if self._kept else numbers.to(self._dtype)

    def release(self, linear: Any) -> None:
        """Nothing is in memory but for the mapped file, whose pages the system takes back."""

    def _raw(self, name: str) -> Bytes:
        """Bytes of a tensor, [rows, bytes of a row]."""
        tensor = self._tensors[name]
        raw = self._bytes[tensor.start : tensor.start + tensor.bytes]
        return raw.reshape(tensor.shape[0] if len(tensor.shape) == 2 else 1, -1)

    def _places(self, name: str) -> Tensor | None:
        """Where each row of the file lies in the model's tensor; None if the order is the same."""
        found = _ALTERNATING.search(name)
        if self._record.architecture != "llama" or found is None:
            return None
        rows, heads = self._tensors[name].shape[0], self._heads[found[1]]
        return torch.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)

    def _widened(self, name: str, which: slice | NDArray[np.int64]) -> Tensor:
        """Rows of a tensor, or numbers of one with one dimension, as float32."""
        tensor, raw = self._tensors[name], self._raw(name)
        if len(tensor.shape) == 1:
            return torch.from_numpy(np.array(gguf.quants.dequantize(raw, Type[tensor.kind])[0][which]))
        chosen = raw[which]
        if (number_format := stored_format(tensor.kind)) is not None:
            packed = PackedWeight(len(chosen), tensor.shape[1], number_format, temporary=True)
            every = torch.arange(len(chosen))
            packed.fill_stored(every, torch.from_numpy(np.ascontiguousarray(chosen)), tensor.kind)
            return packed.rows(every)
        return torch.from_numpy(_dequantized(chosen, tensor))


def _dequantized(rows: Bytes, tensor: GgufTensor) -> NDArray[np.float32]:
    """Rows as float32, by several threads: NumPy releases the interpreter lock."""
    count = max(1, min(torch.get_num_threads(), rows.shape[0] * tensor.shape[1] // _THREAD_NUMBERS))
    parts = np.array_split(rows, count)
    with ThreadPoolExecutor(count) as threads:
        found = list(threads.map(lambda part: gguf.quants.dequantize(part, Type[tensor.kind]), parts))
    return np.concatenate(found) if count > 1 else np.array(found[0])


def _assigned(record: GgufRecord, module: Any) -> dict[str, GgufTensor]:
    """The file's tensors by the names of the model's parameters. Raises ConfigError if they are not the same."""
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[record.architecture], module.config.num_hidden_layers)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.named_parameters()}  # a tied head is left out
    found, used, missing = {}, set(), []
    for name in shapes:
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None or theirs not in record.tensors:
            missing.append(name)
            continue
        found[name] = record.tensors[theirs]
        used.add(theirs)
    file = record.file
    if missing:
        raise ConfigError(f"{file} lacks tensors that the model needs: {some_names(sorted(missing))}; get it whole")
    if wrong := [name for name, tensor in found.items() if tensor.shape != shapes[name]]:
        raise ConfigError(f"{file} has tensors of the wrong shape: {some_names(sorted(wrong))}")
    if spare := sorted(record.tensors.keys() - used - _FACTS):  # the text would be another without them
        raise ConfigError(
            f"{file} has tensors that {type(module).__name__} of transformers does not read, such as {spare[0]}; "
            "take the checkpoint as safetensors instead"
        )
    return found
