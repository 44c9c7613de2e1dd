"""Building the compiled program of a dense decoder from its `transformers` modules, layer by layer.

The modules say what is computed; the weights come from a `WeightSource`, in the number formats of their files where the
kernels have these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from outrider.process.startup import STARTUP
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.matrices import weights
from services.target.kernels.cpu.matrices.weights import ROUNDED, Format, PackedWeight
from services.target.kernels.cpu.programs.program import Activation, Buffer, Norm, Program
from services.target.kernels.cpu.programs.pruned_head import PrunedHead
from services.target.model import decoder
from services.target.model.attention import Probe
from services.target.model.linear import head_format
from services.target.model.stored.source import StoredFormat, WeightSource, parts_of

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_LANES = 16
_EMBEDDING = "model.embed_tokens.weight"
_NARROWER = 0.8  # most bytes of a narrow copy of a weight that has few bits itself
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


class Part(NamedTuple):
    """A packed weight, and the narrow copy of it if there is one."""

    weight: PackedWeight
    narrow: PackedWeight | None


class ProgramBuilder:
    """Walks through a model's modules and appends their operations to the runner's program."""

    def __init__(
        self,
        runner: ProgramOwner,
        module: Any,
        source: WeightSource,
        probe: Probe,
        number_format: Format,
        positions: int,
        copied: Format | None,
        kept: Sequence[int],
    ) -> None:
        """source: of the weights. number_format: of those that the source does not keep in a format of their own.

        kept: layers whose inputs the EAGLE head reads.
        """
        self._kept = {layer: column for column, layer in enumerate(kept)}
        self._runner, self._module, self._probe, self._format = runner, module, probe, number_format
        self._source = source
        self._narrow = copied
        self._config = module.config
        self._names = {id(child): name for name, child in module.named_modules()}
        self._rotary = decoder.RotaryTables(module, positions)
        self._activation = _ACTIVATIONS[decoder.activation(module.config)]
        self.table: Tensor | PackedWeight | None = None  # the embedding

    def build(self) -> None:
        """Build the whole program."""
        program, model = self._runner.program, self._module.model
        head = self._packed_head() if self._shares_head else None  # a tied embedding is in memory once
        scale = float(getattr(model.embed_tokens, "scalar_embed_scale", 1.0))
        self.table = self._embedding() if head is None else head.weight
        program.embed(self.table, float(torch.tensor(scale).to(self._module.dtype)))
        for index, layer in enumerate(model.layers):
            STARTUP.report("packing weights", index, len(model.layers))
            self._mark(index)
            taken = decoder.parts(layer)
            self._attention(index, taken)
            self._feed_forward(taken)
        self._mark(len(model.layers))
        norm = self._norm(model.norm)
        self._format = head_format(self._format) or self._format
        self._narrow = head_format(self._narrow)
        softcap = decoder.final_softcap(self._config)
        pruned = None if softcap or head is not None else self._pruned_head()
        if pruned is not None or self._format == self._narrow:  # the head is narrow itself
            self._narrow = None
        weight, narrow = self._packed_head() if head is None else head
        if pruned is not None:  # drafting steps read the pruned head's copy
            narrow = pruned.weight
            self._runner.weight_bytes += narrow.bytes - weight.bytes
            self._runner.draft_bytes += narrow.bytes - weight.bytes
        program.mark(norm)
        program.head(weight, norm, softcap, pruned, narrow)

    def _embedding(self) -> Tensor | PackedWeight:
        """The embedding, in its own number format or that of the computation."""
        own = self._source.number_format(_EMBEDDING)
        outputs, inputs = self._module.model.embed_tokens.weight.shape
        if own is not None:
            packed = own.new(outputs, inputs)
            if not packed.restore():
                self._source.pack(_EMBEDDING, packed, torch.arange(outputs))
            self._replaced_by_rounding(_EMBEDDING, packed, torch.arange(outputs))
            return packed
        table = self._source.plain(_EMBEDDING).to(self._module.dtype).contiguous()
        self._runner.add_weight(_EMBEDDING, (outputs, inputs), table.copy_)
        return table

    @property
    def _shares_head(self) -> bool:
        return self._tied and self._source.number_format(_EMBEDDING) is not None

    def _packed_head(self) -> Part:
        name = _EMBEDDING if self._tied else self._names[id(self._module.lm_head)] + ".weight"
        return self._pack([self._module.lm_head], names=[name])[0]

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
        norm = self._norm(layer.before_attention)
        self._linears(projections, Buffer.RESIDUAL, Buffer.WIDE, bias=bias, norm=norm)
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
        [(weight, narrow)] = self._pack([layer.gate, layer.up], interleaved=True)
        self._runner.program.linear(
            weight, Buffer.RESIDUAL, Buffer.HIDDEN,
            norm=self._norm(layer.before_feed_forward), activation=self._activation, narrow=narrow,
        )  # fmt: skip
        self._branch(layer.down, Buffer.HIDDEN, layer.after_feed_forward)

    def _branch(self, linear: nn.Linear, source: Buffer, norm: Any) -> None:
        """residual += linear(source), normalised first if there is a norm."""
        bias = self._bias([linear])
        if norm is None:
            self._linears([linear], source, Buffer.RESIDUAL, bias=bias, add=True)
        else:
            self._linears([linear], source, Buffer.BRANCH, bias=bias)
            self._runner.program.add_norm(self._norm(norm))

    def _linears(
        self, linears: list[Any], source: Buffer, target: Buffer, *, bias: Tensor | None, norm: Norm | None = None,
        add: bool = False,
    ) -> None:  # fmt: skip
        """Layers with one input, whose outputs lie side by side: one product for each number format in a row."""
        column = 0
        for part in self._pack(linears):
            own = None if bias is None else bias[column : column + part.weight.outputs]
            self._runner.program.linear(
                part.weight, source, target, norm=norm, bias=own, add=add, narrow=part.narrow, column=column
            )
            column += part.weight.outputs

    def _pack(self, linears: list[Any], *, interleaved: bool = False, names: list[str] | None = None) -> list[Part]:
        """Pack weights of layers with one input one below another, or alternating 16 gates and their 16 values.

        Layers in a row of one number format become one part; gates and values always do. names: of the weights
        """
        names = names or [f"{self._names[id(linear)]}.weight" for linear in linears]
        formats = [self._source.number_format(name) for name in names]
        if interleaved and len(set(formats)) > 1:
            formats = [None] * len(formats)
        parts, first = [], 0
        for number_format, group in itertools.groupby(formats):
            last = first + len(list(group))
            parts.append(self._pack_part(linears[first:last], names[first:last], number_format, interleaved))
            first = last
        return parts

    def _pack_part(self, linears: list[Any], names: list[str], own: StoredFormat | None, interleaved: bool) -> Part:
        """own: the format in which the source keeps the weights."""
        counts = [linear.weight.shape[0] for linear in linears]
        inputs = linears[0].weight.shape[1]
        padded = -(-counts[0] // _LANES) * _LANES  # a panel holds whole groups of gates and values
        width = 2 * padded if interleaved else sum(counts)
        packed = PackedWeight(width, inputs, self._format) if own is None else own.new(width, inputs)
        narrow = None if self._narrow is None else PackedWeight(width, inputs, self._narrow, rough=True)
        if own is not None and narrow is not None and narrow.bytes > _NARROWER * packed.bytes:
            narrow = None
        first = 0
        for part, (linear, name) in enumerate(zip(linears, names, strict=True)):
            if interleaved:
                outputs = weights.interleaved(counts[part], part)
            else:
                outputs, first = torch.arange(first, first + counts[part]), first + counts[part]
            if own is not None and not packed.restore():
                self._source.pack(name, packed, outputs)
            if own is not None:
                self._replaced_by_rounding(name, packed, outputs)
            self._fill(name, outputs, inputs, [narrow] if own is not None else [packed, narrow])
            if name != _EMBEDDING:
                self._source.release(linear)
        self._runner.weight_bytes += packed.bytes
        self._runner.draft_bytes += (narrow or packed).bytes
        return Part(packed, narrow)

    def _replaced_by_rounding(self, name: str, packed: PackedWeight, outputs: Tensor) -> None:
        """Register a weight that is kept in a format of its file, if new numbers can be rounded to that."""
        if packed.format in ROUNDED:
            self._runner.add_weight(name, (len(outputs), packed.inputs), _filling(packed, outputs))

    def _fill(self, name: str, outputs: Tensor, inputs: int, packed: list[PackedWeight | None]) -> None:
        """Pack a weight that is read in the format of the computation."""
        wanted = [one for one in packed if one is not None]
        missing = [one for one in wanted if not one.restore()]
        for begin, end in parts_of(len(outputs), inputs) if missing else ():
            rows = self._source.rows(name, begin, end)
            for one in missing:
                one.fill(outputs[begin:end], rows)
        for one in wanted:
            self._runner.add_weight(name, (len(outputs), inputs), _filling(one, outputs))

    def _pruned_head(self) -> PrunedHead | None:
        """A narrow copy of the LM head, if the head is plain and large enough for it."""
        head = self._module.lm_head
        name = _EMBEDDING if self._tied else self._names[id(head)] + ".weight"
        outputs, inputs = head.weight.shape
        plain = self._format in (Format.FLOAT32, Format.BFLOAT16) and self._source.number_format(name) is None
        if not plain or outputs < MIN_PRUNED_OUTPUTS:
            return None
        pruned, everything = PrunedHead(outputs, inputs), torch.arange(outputs)
        own = torch.bfloat16 if self._format == Format.BFLOAT16 else torch.float32
        for begin, end in () if pruned.restore() else parts_of(outputs, inputs):
            pruned.fill(everything[begin:end], self._source.rows(name, begin, end).to(own))

        def fill(weight: Tensor) -> None:
            pruned.fill(everything, weight.detach().to(own))

        self._runner.add_weight(name, (outputs, inputs), fill)
        return pruned

    def _bias(self, linears: list[Any]) -> Tensor | None:
        """Biases of layers with one input; None if none has a bias."""
        if all(linear.bias is None for linear in linears):
            return None
        counts = [linear.out_features for linear in linears]
        bias = torch.zeros(sum(counts))
        for part, linear in zip(bias.split(counts), linears, strict=True):
            if linear.bias is not None:
                name = self._names[id(linear)] + ".bias"
                part.copy_(self._source.plain(name))
                self._runner.add_weight(name, tuple(part.shape), part.copy_)
        return bias

    def _norm(self, module: Any) -> Norm:
        shift = decoder.norm_shift(self._config)
        name = self._names[id(module)] + ".weight"
        weight = self._source.plain(name).float() + shift
        self._runner.add_weight(name, tuple(weight.shape), lambda new: weight.copy_(new.float() + shift))
        return Norm(weight, decoder.norm_epsilon(module))


def _filling(packed: PackedWeight, outputs: Tensor) -> Callable[[Tensor], object]:
    return lambda weight: packed.fill(outputs, weight)
