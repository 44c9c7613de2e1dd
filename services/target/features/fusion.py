"""Conversion of captured hidden states to rows of the wire: a drafter's norms, its fusion layer and a number format.

The fusion is the drafter's own first layer. Because it is linear, applying it here makes the rows narrower on the wire:
one hidden width of the drafter instead of one of the target for every state.
"""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.serving.features import FLOAT8_MAX, FeatureFormat, FeatureSpec
from services.target.kernels.cpu.matrices.weights import PackedWeight
from services.target.model.base import Model, Runner
from services.target.model.linear import NativeLinear, laid_out
from services.target.model.native import ProgramRunner
from services.target.step.batch import Capture

_FORMATS = {FeatureFormat.BFLOAT16: torch.bfloat16, FeatureFormat.FLOAT32: torch.float32}


class Fusion:
    """The conversion of one specification. layers, final: states to capture; width, row_bytes: of a row.

    fuses: False if the states are sent unchanged or only normalised
    layer: weight and bias that a compiled program may apply while it captures; their result is the row of the wire
    """

    def __init__(self, spec: FeatureSpec, content: bytes, model: Model) -> None:
        """content: the safetensors file that `FeatureSpec` describes, or empty. Raises ConfigError."""
        depth = len(model.shapes)
        self.layers = spec.layers if spec.layers or spec.final else (2, depth // 2, depth - 3)
        self.final = spec.final
        if list(self.layers) != sorted(set(self.layers)) or (self.layers and self.layers[-1] > depth):
            raise ConfigError(
                f"the drafter asks for the states before layers {list(self.layers)} of {depth}; they must ascend, and "
                "none may lie beyond the end"
            )
        self._format = spec.format
        self._epsilon = spec.norm_epsilon
        # Raw states can exceed the range of float16.
        self._dtype = torch.float32 if model.dtype == torch.float16 else model.dtype
        self._hidden = model.hidden_size
        self._states = len(self.layers) + self.final
        tensors = {name: t.to(model.device, self._dtype) for name, t in _read(content).items()}
        weight, bias = tensors.pop("fc.weight", None), tensors.pop("fc.bias", None)
        self._whole_norm = tensors.pop("norm_before_fc.weight", None)
        self._norms = [tensors.pop(f"fc_norm.{i}.weight", None) for i in range(self._states)]
        if tensors:
            raise ConfigError(f"the drafter's fusion has tensors that are not known: {', '.join(sorted(tensors))}")
        self.width = self._check(weight, bias)
        self._fc = None if weight is None else _linear(weight, bias, model.runner)
        self.fuses = self._fc is not None
        self.layer = self._layer(model)
        sizes = {FeatureFormat.BFLOAT16: 2 * self.width, FeatureFormat.FLOAT32: 4 * self.width}
        self.row_bytes = sizes.get(self._format, 4 + self.width)

    def _layer(self, model: Model) -> tuple[PackedWeight, Tensor | None] | None:
        """The fusion layer, if a compiled program can apply it and the conversion has no other part; else None."""
        plain = self._whole_norm is None and all(norm is None for norm in self._norms)
        same = _FORMATS.get(self._format) is model.dtype
        if not (plain and same and isinstance(model.runner, ProgramRunner) and isinstance(self._fc, NativeLinear)):
            return None
        return self._fc.laid_out

    def _check(self, weight: Tensor | None, bias: Tensor | None) -> int:
        """Check shapes against the model. Returns the width of a row. Raises ConfigError."""
        wide = self._states * self._hidden
        width = wide if weight is None else weight.shape[0]
        expected = [
            ("fc.weight", weight, (width, wide)),
            ("fc.bias", bias, (width,)),
            ("norm_before_fc.weight", self._whole_norm, (wide,)),
            *((f"fc_norm.{i}.weight", norm, (self._hidden,)) for i, norm in enumerate(self._norms)),
        ]
        for name, tensor, shape in expected:
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ConfigError(
                    f"the drafter's {name} has shape {list(tensor.shape)}; {self._states} states of this model, "
                    f"{self._hidden} numbers each, need {list(shape)}"
                )
        if bias is not None and weight is None:
            raise ConfigError("the drafter's fusion has fc.bias, but no fc.weight")
        if any(norm is None for norm in self._norms) and any(norm is not None for norm in self._norms):
            raise ConfigError(f"the drafter's fusion needs fc_norm of each of its {self._states} states, or of none")
        return width

    def apply(self, states: Tensor) -> Tensor:
        """Convert states, [F, W], as selected. Returns [F, row_bytes] uint8, as on the wire, on the device."""
        x = states.to(self._dtype)
        if self._norms and self._norms[0] is not None:
            parts = x.split(self._hidden, dim=-1)
            x = torch.cat([self._norm(part, norm) for part, norm in zip(parts, self._norms, strict=True)], dim=-1)
        if self._whole_norm is not None:
            x = self._norm(x, self._whole_norm)
        if self._fc is not None:
            x = self._fc(x)
        return _encode(x, self._format)

    def select(self, states: Tensor, capture: Capture) -> Tensor:
        """The states that this fusion reads, [F, W']. states: [F, W], captured, perhaps more than these."""
        if (capture.layers, capture.final) == (self.layers, self.final):
            return states
        parts = dict(zip((*capture.layers, -1), states.split(self._hidden, dim=-1), strict=False))
        return torch.cat([parts[layer] for layer in (*self.layers, *([-1] if self.final else []))], dim=-1)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), weight, self._epsilon)


def _linear(weight: Tensor, bias: Tensor | None, runner: Runner) -> nn.Module:
    """A linear layer; on a CPU with the model's own kernels, because PyTorch's threads would compete with theirs."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return laid_out(linear, threads=runner.threads if isinstance(runner, ProgramRunner) else None)


def _read(content: bytes) -> dict[str, Tensor]:
    if not content:
        return {}
    try:
        return load(content)
    except SafetensorError as error:
        raise ConfigError(f"the drafter's fusion is no safetensors file: {error}") from None


def _encode(x: Tensor, layout: FeatureFormat) -> Tensor:
    """x: [F, width]. Returns [F, row bytes] uint8."""
    if layout is FeatureFormat.FLOAT32:
        return x.to(torch.float32).contiguous().view(torch.uint8)
    if layout is FeatureFormat.BFLOAT16:
        return x.to(torch.bfloat16).contiguous().view(torch.uint8)
    x = x.to(torch.float32)
    scale = (x.abs().amax(dim=-1, keepdim=True) / FLOAT8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
    small = (x / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)
    return torch.cat([scale.view(torch.uint8), small.view(torch.uint8)], dim=-1)
