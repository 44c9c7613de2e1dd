"""Where each tensor of a checkpoint lives in a loaded model, so that it can be replaced while the process runs.

    name in the checkpoint          place
    a parameter's or buffer's own   that tensor, overwritten where it lies
    a packed linear layer's weight  the layer, which packs it anew
    one expert's projection         a slice of the parameter in which `transformers` fuses all experts of a layer
    a name that is tied to another  nowhere of its own: who writes the other writes it, too
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Write = Callable[[Tensor], object]

# Checkpoints have a matrix an expert; the model has one tensor a layer: [experts, 2 * I, H] (gate above up), [experts, H, I].
_FUSED = re.compile(r"(?P<layer>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


class Places:
    """The places of a model's weights. Raises nothing: what has no place is not among `shapes`."""

    def __init__(self, module: Any) -> None:
        """module: a causal LM of `transformers`; its linear layers may be packed."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._writes: dict[str, list[Write]] = {}
        tied: Mapping[str, str] = getattr(module, "all_tied_weights_keys", None) or {}
        for name, shape, write in _own_places(module):
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


def _own_places(module: nn.Module) -> Iterator[tuple[str, tuple[int, ...], Write]]:
    """Every name with its shape and how it is written, names that share a tensor included."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        replace = getattr(child, "replace_weight", None)
        if replace is not None:
            yield f"{dot}weight", (child.out_features, child.in_features), replace
        for name, tensor in _tensors(child):
            yield from _slices(dot + name, tensor)


def _tensors(child: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and those of its buffers that checkpoints have."""
    yield from ((name, tensor) for name, tensor in child._parameters.items() if tensor is not None)
    for name, buffer in child._buffers.items():
        if buffer is not None and name not in child._non_persistent_buffers_set:
            yield name, buffer


def _slices(name: str, tensor: Tensor) -> Iterator[tuple[str, tuple[int, ...], Write]]:
    fused = _FUSED.match(name)
    if fused is None or tensor.dim() != 3:
        yield name, tuple(tensor.shape), tensor.copy_
        return
    for index, matrix in enumerate(tensor):
        expert = f"{fused['layer']}.{index}"
        if fused["kind"] == "down_proj":
            parts = {"down_proj": matrix}
        else:
            gate, up = matrix.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up}
        for part, place in parts.items():
            yield f"{expert}.{part}.weight", tuple(place.shape), place.copy_
