"""Where each tensor of a checkpoint lives in a loaded model, so that it can be replaced while the process runs.

    name in the checkpoint          place
    a parameter's or buffer's own   that tensor, overwritten where it lies
    a packed linear layer's weight  the layer, which packs it anew
    one expert's projection         a slice of the parameter in which `transformers` fuses all experts of a layer
    a name that is tied to another  nowhere of its own: who writes the other writes it, too

A model whose loading changes names or layouts in other ways has no places at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

Write = Callable[[Tensor], object]
Place = tuple[str, tuple[int, ...], Write]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EVERY = ".*."  # in a converter's pattern: the number of an expert


class WeightSlots:
    """The places of a model's weights. `shapes` is empty for a model that has none."""

    def __init__(self, module: Any) -> None:
        """module: a causal LM of `transformers`; its linear layers may be packed."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._writes: dict[str, list[Write]] = {}
        fused = _fused(module)
        if fused is None or not all(_plain(parameter) for parameter in module.parameters()):
            return
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for name, shape, write in _own_places(module, fused):
            source = tied.get(name, name)
            self._writes.setdefault(source, []).append(write)
            self.shapes.setdefault(source, shape)

    @torch.inference_mode()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors in their places. Names and shapes must be those of `shapes`."""
        for name, tensor in tensors.items():
            assert tuple(tensor.shape) == self.shapes[name], "names and shapes are checked before anything is written"
            for write in self._writes[name]:
                write(tensor)


def _plain(parameter: nn.Parameter) -> bool:
    """False for weights in a format of their own, quantized or shared by devices."""
    return type(parameter.data) is Tensor and parameter.dtype in _DTYPES


def _fused(module: Any) -> Mapping[str, tuple[str, str, tuple[str, ...]]] | None:
    """Parameters that hold all experts of a layer: end of the name -> what stands for it in checkpoints, as text before
    and behind the expert's number, in order of the parts that lie above one another. None for other conversions.
    """
    fused: dict[str, tuple[str, str, tuple[str, ...]]] = {}
    for conversion in getattr(module, "_weight_conversions", None) or ():
        if not isinstance(conversion, WeightConverter) or len(conversion.target_patterns) != 1:
            return None
        sources = [pattern.split(_EVERY) for pattern in conversion.source_patterns]
        kinds = [type(operation) for operation in conversion.operations]
        if kinds != [MergeModulelist, Concatenate][: len(kinds)] or len(kinds) != min(len(sources), 2):
            return None
        if any(len(source) != 2 for source in sources) or len({before for before, _ in sources}) != 1:
            return None
        target = conversion.target_patterns[0]
        fused[target] = (target, sources[0][0], tuple(behind for _, behind in sources))
    return fused


def _own_places(module: nn.Module, fused: Mapping[str, tuple[str, str, tuple[str, ...]]]) -> Iterator[Place]:
    """Every name with its shape and how it is written, names that share a tensor included."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        replace = getattr(child, "replace_weight", None)
        if replace is not None:
            yield f"{dot}weight", (child.out_features, child.in_features), replace
        for name, tensor in _tensors(child):
            parts = next((fused[end] for end in fused if (dot + name).endswith(end)), None)
            if parts is None:
                yield dot + name, tuple(tensor.shape), tensor.copy_
            else:
                yield from _slices(dot + name, tensor, *parts)


def _tensors(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and those of its buffers that checkpoints have."""
    yield from ((name, tensor) for name, tensor in child._parameters.items() if tensor is not None)
    for name, buffer in child._buffers.items():
        if buffer is not None and name not in child._non_persistent_buffers_set:
            yield name, buffer


def _slices(name: str, tensor: Tensor, end: str, before: str, behind: tuple[str, ...]) -> Iterator[Place]:
    """tensor: [experts, parts * rows, columns]."""
    head = name.removesuffix(end) + before
    for expert, matrix in enumerate(tensor):
        for part, place in zip(behind, matrix.chunk(len(behind)), strict=True):
            yield f"{head}.{expert}.{part}", tuple(place.shape), place.copy_
