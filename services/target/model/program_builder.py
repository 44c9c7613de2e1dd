"""Building the compiled program of a dense decoder from its `transformers` modules, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.matrices import weights
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight
from services.target.kernels.cpu.programs.program import Activation, Buffer, Norm, Program
from services.target.kernels.cpu.programs.pruned_head import PrunedHead
from services.target.model import decoder
from services.target.model.attention import Probe
from services.target.model.linear import head_format

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_LANES = 16
MIN_PRUNED_OUTPUTS = 8192
"""Outputs from which a narrow copy of the LM head saves time; smaller heads stay in the CPU's caches."""


class ProgramOwner(Protocol):
    """The runner that a program is built for."""

    program: Program
    weight_bytes: int
    draft_bytes: int

    def add_weight(self, name: str, shape: tuple[int, ...], write: Callable[[Tensor], object]) -> None:
        """Register how a weight is replaced."""
        ...


class ProgramBuilder:
    """Walks through a model's modules and appends their operations to the runner's program."""

    def __init__(
        self,
        runner: ProgramOwner,
        module: Any,
        probe: Probe,
        number_format: Format,
        positions: int,
        copied: Format | None,
        kept: Sequence[int],
    ) -> None:
        """kept: layers whose inputs the EAGLE head reads."""
        self._kept = {layer: column for column, layer in enumerate(kept)}
        self._runner, self._module, self._probe, self._format = runner, module, probe, number_format
        self._narrow = copied
        self._config = module.config
        self._names = {id(child): name for name, child in module.named_modules()}
        self._rotary = decoder.RotaryTables(module, positions)
        self._activation = _ACTIVATIONS[decoder.activation(module.config)]

    def build(self) -> Tensor:
        """Build the whole program. Returns the embedding, [V, H]."""
        program, model = self._runner.program, self._module.model
        table: Tensor = model.embed_tokens.weight.data.contiguous()
        scale = float(getattr(model.embed_tokens, "scalar_embed_scale", 1.0))
        program.embed(table, float(torch.tensor(scale).to(table.dtype)))
        self._runner.add_weight("model.embed_tokens.weight", tuple(table.shape), table.copy_)
        for index, layer in enumerate(model.layers):
            self._mark(index)
            taken = decoder.parts(layer)
            self._attention(index, taken)
            self._feed_forward(taken)
        self._mark(len(model.layers))
        norm = self._norm(model.norm)
        self._format = head_format(self._format) or self._format
        self._narrow = head_format(self._narrow)
        tied = "model.embed_tokens" if self._tied else None
        softcap = decoder.final_softcap(self._config)
        pruned = None if softcap else self._pruned_head(self._module.lm_head, tied)
        if pruned is not None or self._format == self._narrow:  # the head is narrow itself
            self._narrow = None
        head, narrow = self._pack([self._module.lm_head], tied=tied)
        if pruned is not None:  # drafting steps read the pruned head's copy
            narrow = pruned.weight
            self._runner.weight_bytes += narrow.bytes - head.bytes
            self._runner.draft_bytes += narrow.bytes - head.bytes
        program.mark(norm)
        program.head(head, norm, softcap, pruned, narrow)
        return table

    def _mark(self, layer: int) -> None:
        """Mark a layer's input for capture, and store it if the EAGLE head reads it."""
        program = self._runner.program
        program.mark()
        if layer in self._kept:
            program.store_state(self._kept[layer] * self._config.hidden_size)

    @property
    def _tied(self) -> bool:
        return self._module.lm_head.weight is self._module.model.embed_tokens.weight

    def _attention(self, index: int, layer: decoder.LayerModules) -> None:
        program = self._runner.program
        projections = list(layer.projections)
        bias = self._bias(projections)
        weight, narrow = self._pack(projections)
        norm = self._norm(layer.before_attention)
        program.linear(weight, Buffer.RESIDUAL, Buffer.WIDE, norm=norm, bias=bias, narrow=narrow)
        call = self._probe.calls[index]
        shape = AttentionShape(
            call.q.shape[1], call.k.shape[1], call.k.shape[2], call.v.shape[2],
            call.scaling, call.window or 0, call.softcap or 0.0, None,
        )  # fmt: skip
        query_norm, key_norm = (
            None if module is None else self._norm(module) for module in (layer.query_norm, layer.key_norm)
        )
        program.attend(index, shape, *self._rotary.of(index), query_norm, key_norm)
        self._branch(layer.output, Buffer.ATTENDED, layer.after_attention)

    def _feed_forward(self, layer: decoder.LayerModules) -> None:
        weight, narrow = self._pack([layer.gate, layer.up], interleaved=True)
        self._runner.program.linear(
            weight, Buffer.RESIDUAL, Buffer.HIDDEN,
            norm=self._norm(layer.before_feed_forward), activation=self._activation, narrow=narrow,
        )  # fmt: skip
        self._branch(layer.down, Buffer.HIDDEN, layer.after_feed_forward)

    def _branch(self, linear: nn.Linear, source: Buffer, norm: Any) -> None:
        """residual += linear(source), normalised first if there is a norm."""
        program = self._runner.program
        bias, (weight, narrow) = self._bias([linear]), self._pack([linear])
        if norm is None:
            program.linear(weight, source, Buffer.RESIDUAL, bias=bias, add=True, narrow=narrow)
        else:
            program.linear(weight, source, Buffer.BRANCH, bias=bias, narrow=narrow)
            program.add_norm(self._norm(norm))

    def _pack(
        self, linears: list[Any], *, interleaved: bool = False, tied: str | None = None
    ) -> tuple[PackedWeight, PackedWeight | None]:
        """Pack weights of layers with one input one below another, or alternating 16 gates and their 16 values.

        Returns the packed weight and its narrow copy, if the runner has one.
        """
        counts = [linear.weight.shape[0] for linear in linears]
        inputs = linears[0].weight.shape[1]
        padded = -(-counts[0] // _LANES) * _LANES  # a panel holds whole groups of gates and values
        width = 2 * padded if interleaved else sum(counts)
        packed = PackedWeight(width, inputs, self._format)
        narrow = None if self._narrow is None else PackedWeight(width, inputs, self._narrow, rough=True)
        first = 0
        for part, linear in enumerate(linears):
            if interleaved:
                outputs = weights.interleaved(counts[part], part)
            else:
                outputs, first = torch.arange(first, first + counts[part]), first + counts[part]
            name = (tied or self._names[id(linear)]) + ".weight"
            for one in (packed, narrow):
                if one is not None:
                    one.fill(outputs, linear.weight)
                    self._runner.add_weight(name, tuple(linear.weight.shape), _filling(one, outputs))
            if not tied:  # one by one, so that at most one layer is in memory twice
                linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self._runner.weight_bytes += packed.bytes
        self._runner.draft_bytes += (narrow or packed).bytes
        return packed, narrow

    def _pruned_head(self, head: nn.Linear, tied: str | None) -> PrunedHead | None:
        """A narrow copy of the LM head, if the head is large enough for it."""
        outputs, inputs = head.weight.shape
        if self._format not in (Format.FLOAT32, Format.BFLOAT16) or outputs < MIN_PRUNED_OUTPUTS:
            return None
        pruned, everything = PrunedHead(outputs, inputs), torch.arange(outputs)
        own = torch.bfloat16 if self._format == Format.BFLOAT16 else torch.float32

        def fill(weight: Tensor) -> None:
            pruned.fill(everything, weight.detach().to(own))

        fill(head.weight)
        self._runner.add_weight((tied or self._names[id(head)]) + ".weight", (outputs, inputs), fill)
        return pruned

    def _bias(self, linears: list[Any]) -> Tensor | None:
        """Biases of layers with one input; None if none has a bias."""
        if all(linear.bias is None for linear in linears):
            return None
        counts = [linear.out_features for linear in linears]
        bias = torch.zeros(sum(counts))
        for part, linear in zip(bias.split(counts), linears, strict=True):
            if linear.bias is not None:
                part.copy_(linear.bias)
                self._runner.add_weight(self._names[id(linear)] + ".bias", tuple(part.shape), part.copy_)
        return bias

    def _norm(self, module: Any) -> Norm:
        shift = decoder.norm_shift(self._config)
        weight = module.weight.detach().float() + shift
        self._runner.add_weight(
            self._names[id(module)] + ".weight", tuple(weight.shape), lambda new: weight.copy_(new.float() + shift)
        )
        return Norm(weight, decoder.norm_epsilon(module))


def _filling(packed: PackedWeight, outputs: Tensor) -> Callable[[Tensor], object]:
    return lambda weight: packed.fill(outputs, weight)
