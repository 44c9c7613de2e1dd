"""The slot of each checkpoint tensor in a loaded model, so that weights can be replaced while the process runs.

    name in the checkpoint          slot
    a parameter or buffer           that tensor, overwritten in place
    a packed linear layer's weight  the layer, which packs it again
    one expert's projection         a slice of the parameter in which `transformers` fuses all experts of a layer
    a name tied to another          none of its own: a write to the other name writes it, too

A model whose loading changes names or layouts in other ways has no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

Write = Callable[[Tensor], object]
Slot = tuple[str, tuple[int, ...], Write]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EVERY = ".*."  # in a converter's pattern: the number of an expert


class WeightSlots:
    """The slots of a model's weights. shapes: by name; empty for a model without slots."""

    def __init__(self, module: Any) -> None:
        """module: a causal LM of `transformers`; its linear layers may be packed."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._writes: dict[str, list[Write]] = {}
        fused = _fused(module)
        if fused is None or not all(_plain(parameter) for parameter in module.parameters()):
            return
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for name, shape, write in _own_slots(module, fused):
            source = tied.get(name, name)
            self._writes.setdefault(source, []).append(write)
            self.shapes.setdefault(source, shape)

    @torch.inference_mode()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their slots. Names and shapes must be those of `shapes`."""
        for name, tensor in tensors.items():
            assert tuple(tensor.shape) == self.shapes[name], "names and shapes are checked before anything is written"
            for write in self._writes[name]:
                write(tensor)


def _plain(parameter: nn.Parameter) -> bool:
    """False for weights that are quantized or sharded."""
    return type(parameter.data) is Tensor and parameter.dtype in _DTYPES


def _fused(module: Any) -> Mapping[str, tuple[str, str, tuple[str, ...]]] | None:
    """Parameters that hold all experts of a layer: end of the parameter's name -> that end, and the text before and
    after the expert's number in checkpoint names, in the order of the stacked parts. None for other conversions.
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


def _own_slots(module: nn.Module, fused: Mapping[str, tuple[str, str, tuple[str, ...]]]) -> Iterator[Slot]:
    """Every name with its shape and write function, including names that share a tensor."""
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
    """A module's own parameters, and its buffers that are stored in checkpoints."""
    yield from ((name, tensor) for name, tensor in child._parameters.items() if tensor is not None)
    for name, buffer in child._buffers.items():
        if buffer is not None and name not in child._non_persistent_buffers_set:
            yield name, buffer


def _slices(name: str, tensor: Tensor, end: str, before: str, behind: tuple[str, ...]) -> Iterator[Slot]:
    """tensor: [experts, parts * rows, columns]."""
    head = name.removesuffix(end) + before
    for expert, matrix in enumerate(tensor):
        for part, rows in zip(behind, matrix.chunk(len(behind)), strict=True):
            yield f"{head}.{expert}.{part}", tuple(rows.shape), rows.copy_
