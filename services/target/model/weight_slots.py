"""The slot of each checkpoint tensor in a loaded model, so that weights can be replaced while the process runs.

    name in the checkpoint          slot
    a parameter or buffer           that tensor, overwritten in place
    a packed linear layer's weight  the layer, which packs it again
    one expert's projection         a slice of the parameter in which `transformers` fuses all experts of a layer
    a name tied to another          none of its own: a write to the other name writes it, too

With tensor parallelism a slot holds this rank's part of the tensor; names and shapes are those of the whole one.
A model whose loading changes names or layouts in other ways has no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from services.target.model.parallel.shard import Shard
from services.target.model.parallel.split import shards_of

Write = Callable[[Tensor], object]


class Slot(NamedTuple):
    """The place of a tensor. shard: the part of it that is written; None for all of it."""

    name: str
    shape: tuple[int, ...]
    write: Write
    shard: Shard | None = None

    def part(self, whole: Tensor) -> Tensor:
        """What is written of a tensor."""
        return whole if self.shard is None else self.shard.part(whole)


_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_EVERY = ".*."  # in a converter's pattern: the number of an expert


class WeightSlots:
    """The slots of a model's weights. shapes: by name; empty for a model without slots."""

    def __init__(self, module: Any) -> None:
        """module: a causal LM of `transformers`; its linear layers may be packed."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._slots: dict[str, list[Slot]] = {}
        fused = _fused(module)
        if fused is None or not all(_plain(parameter) for parameter in module.parameters()):
            return
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        slots = list(_own_slots(module, fused, shards_of(module)))
        if any(slot is None for slot in slots):
            return
        for slot in filter(None, slots):
            source = tied.get(slot.name, slot.name)
            self._slots.setdefault(source, []).append(slot)
            self.shapes.setdefault(source, slot.shape)

    @torch.inference_mode()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their slots. Names and shapes must be those of `shapes`."""
        for name, tensor in tensors.items():
            self.write_parts(name, self.parts(name, tensor))

    def parts(self, name: str, tensor: Tensor) -> list[Tensor]:
        """What `write` would write of a tensor, in each of its slots; views of it."""
        assert tuple(tensor.shape) == self.shapes[name], "names and shapes are checked before anything is written"
        return [slot.part(tensor) for slot in self._slots[name]]

    @torch.inference_mode()
    def write_parts(self, name: str, parts: Sequence[Tensor]) -> None:
        """Write the parts of a tensor to its slots."""
        for slot, part in zip(self._slots[name], parts, strict=True):
            slot.write(part)


def _plain(parameter: nn.Parameter) -> bool:
    """False for quantized weights."""
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


def _own_slots(
    module: nn.Module, fused: Mapping[str, tuple[str, str, tuple[str, ...]]], shards: Mapping[str, Shard]
) -> Iterator[Slot | None]:
    """Every name, including names that share a tensor. None for a tensor that the rank's part of does not show."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        replace = getattr(child, "replace_weight", None)
        if replace is not None:
            yield _slot(f"{dot}weight", (child.out_features, child.in_features), replace, shards)
        for name, tensor in _tensors(child):
            parts = next((fused[end] for end in fused if (dot + name).endswith(end)), None)
            if parts is None:
                yield _slot(dot + name, tuple(tensor.shape), tensor.copy_, shards)
            else:
                yield from _slices(dot + name, tensor, *parts, shards.get(dot + name))


def _slot(name: str, shape: tuple[int, ...], write: Write, shards: Mapping[str, Shard]) -> Slot:
    shard = shards.get(name)
    return Slot(name, shape if shard is None else shard.whole_shape(shape), write, shard)


def _tensors(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and its buffers that are stored in checkpoints."""
    yield from ((name, tensor) for name, tensor in child._parameters.items() if tensor is not None)
    for name, buffer in child._buffers.items():
        if buffer is not None and name not in child._non_persistent_buffers_set:
            yield name, buffer


def _slices(
    name: str, tensor: Tensor, end: str, before: str, behind: tuple[str, ...], shard: Shard | None
) -> Iterator[Slot | None]:
    """tensor: [experts, parts * rows, columns], or a rank's part of it."""
    head = name.removesuffix(end) + before
    of_matrix = None if shard is None else shard.of_matrix(len(behind))
    if shard is not None and of_matrix is None:
        yield None
        return
    for expert, matrix in enumerate(tensor):
        for part, rows in zip(behind, matrix.chunk(len(behind)), strict=True):
            shape = tuple(rows.shape) if of_matrix is None else of_matrix.whole_shape(tuple(rows.shape))
            yield Slot(f"{head}.{expert}.{part}", shape, rows.copy_, of_matrix)
