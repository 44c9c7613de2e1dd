"""Dense decoders (decoder.py) on the CPU as programs of compiled kernels, taken from a loaded `transformers` model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from services.target.kernels.cpu import library, weights
from services.target.kernels.cpu.attention import WIDEST_HEAD, reads
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.program import Activation, Buffer, Norm, Program
from services.target.kernels.cpu.screen import Screen
from services.target.kernels.cpu.weights import Format, PackedWeight
from services.target.kernels.kv_cache import KVCache
from services.target.model import decoder
from services.target.model.attention import Probe
from services.target.model.base import Outputs
from services.target.model.head import Head, HeadWeights
from services.target.model.linear import head_format, plain_format
from services.target.step.batch import Batch
from services.target.step.programs import FusedLoop

_ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU_TANH}
_LANES = 16
SCREENED = 8192  # outputs from which a narrow copy of a head pays; smaller ones stay in caches
_WIDEST_NORM = 16384  # in kernels/cpu/csrc/norm.h


def serves(settings: Any) -> bool:
    """True if there are kernels on this machine for checkpoints of such a configuration."""
    return settings.model_type in decoder.MODEL_TYPES and library.available()


def reason_against(module: Any, backend: str, cache_dtype: torch.dtype) -> str | None:
    """Why a model cannot be a program; None if it can. backend: that of --attention-backend."""
    if (against := decoder.reason_against(module)) is not None:
        return against
    try:
        library.load()
    except library.Unavailable as reason:
        return f"there are no compiled kernels, because {reason}"
    if backend not in ("auto", "native"):
        return f"--attention-backend is {backend}"
    if plain_format(module.dtype) is None or not reads(module.dtype, cache_dtype):
        return f"there are no kernels for {_named(module.dtype)} with a cache in {_named(cache_dtype)}"
    if module.model.layers[0].self_attn.head_dim > WIDEST_HEAD or module.config.hidden_size > _WIDEST_NORM:
        return "it is too wide for the kernels"
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class ProgramRunner:
    """A `Runner` of a compiled program."""

    def __init__(
        self,
        module: Any,
        probe: Probe,
        number_format: Format | None,
        positions: int,
        pools: torch.dtype,
        copied: Format | None = None,
        *,
        prompt_lookup: bool = False,
        head: HeadWeights | None = None,
    ) -> None:
        """module: a model for which there is no `reason_against`; its linear layers lose their weights.

        number_format: of the weights; None is the model's own. positions: most tokens of a session;
        pools: dtype of the KV cache. copied: the narrow format of a copy of the weights, for bursts that draft.
        prompt_lookup: as of Model. head: what drafts behind it.
        """
        own = plain_format(module.dtype)
        assert own is not None, "other formats are a reason against"
        self._dtype: torch.dtype = module.dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._writes: dict[str, Callable[[Tensor], object]] = {}
        self.threads = torch.get_num_threads()
        self._program = Program(self.threads, module.dtype, pools, module.config.hidden_size)
        self.weight_bytes = self.draft_bytes = 0  # that a step reads, and one that drafts
        self.copied, self.prompt_lookup = copied is not None, prompt_lookup
        kept = () if head is None else head.layers
        table = _Builder(self, module, probe, number_format or own, positions, copied, kept).build()
        self.head: Head | None = None
        if head is not None:
            depth = len(module.model.layers)
            self.head = Head(head, self._program, self.threads, table, pools, depth, positions)
            self.draft_bytes = self.draft_bytes if self.copied else self.head.bytes

    @property
    def drafts(self) -> bool:
        """True if it guesses tokens, with a copy of its weights or a head."""
        return self.copied or self.head is not None

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """Write the batch's keys and values; return logits in float32, features in the model's dtype, and tokens."""
        if isinstance(batch.program, FusedLoop):
            head = None if self.head is None else self.head.program
            logits, tokens, iterations = self._program.loop(head, batch, cache)
            return Outputs(logits, None, tokens, iterations)
        logits, features, tokens = self._program.run(batch, cache)
        return Outputs(logits, features if features is None else features.to(self._dtype), tokens)

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the weights, as checkpoints have them."""
        return self._shapes

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace weights where they lie. Wider ones are rounded first, as they are when a model is loaded."""
        for name, tensor in tensors.items():
            self._writes[name](tensor.to(self._dtype))

    def place(self, name: str, shape: tuple[int, ...], write: Callable[[Tensor], object]) -> None:
        """Say how a weight is replaced; a name may have several places."""
        before = self._writes.get(name)
        self._shapes[name] = shape
        self._writes[name] = write if before is None else lambda tensor: (before(tensor), write(tensor))


class _Builder:
    """Goes through a model's modules and writes its program."""

    def __init__(
        self,
        runner: ProgramRunner,
        module: Any,
        probe: Probe,
        number_format: Format,
        positions: int,
        copied: Format | None,
        kept: Sequence[int],
    ) -> None:
        """kept: layers whose inputs a head reads."""
        self._kept = {layer: column for column, layer in enumerate(kept)}
        self._runner, self._module, self._probe, self._format = runner, module, probe, number_format
        self._narrow = copied
        self._config = module.config
        self._names = {id(child): name for name, child in module.named_modules()}
        self._turns = decoder.Rotation(module, positions)
        self._activation = _ACTIVATIONS[decoder.activation(module.config)]

    def build(self) -> Tensor:
        """The whole program. Returns the embedding, [V, H]."""
        program, model = self._runner._program, self._module.model
        table = model.embed_tokens.weight.data.contiguous()
        scale = float(getattr(model.embed_tokens, "scalar_embed_scale", 1.0))
        program.embed(table, float(torch.tensor(scale).to(table.dtype)))
        self._runner.place("model.embed_tokens.weight", tuple(table.shape), table.copy_)
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
        screen = None if softcap else self._screen(self._module.lm_head, tied)
        if screen is not None or self._format == self._narrow:  # which is narrow itself
            self._narrow = None
        head, narrow = self._pack([self._module.lm_head], tied=tied)
        if screen is not None:  # is read in its place
            narrow = screen.weight
            self._runner.weight_bytes += narrow.bytes - head.bytes
            self._runner.draft_bytes += narrow.bytes - head.bytes
        program.mark(norm)
        program.head(head, norm, softcap, screen, narrow)
        return table

    def _mark(self, layer: int) -> None:
        """A place where states can be captured, and are kept for a head that wants them."""
        program = self._runner._program
        program.mark()
        if layer in self._kept:
            program.keep(self._kept[layer] * self._config.hidden_size)

    @property
    def _tied(self) -> bool:
        return self._module.lm_head.weight is self._module.model.embed_tokens.weight

    def _attention(self, index: int, layer: decoder.Parts) -> None:
        program = self._runner._program
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
        program.attend(index, shape, *self._turns.of(index), query_norm, key_norm)
        self._branch(layer.output, Buffer.ATTENDED, layer.after_attention)

    def _feed_forward(self, layer: decoder.Parts) -> None:
        weight, narrow = self._pack([layer.gate, layer.up], interleaved=True)
        self._runner._program.linear(
            weight, Buffer.RESIDUAL, Buffer.HIDDEN,
            norm=self._norm(layer.before_feed_forward), activation=self._activation, narrow=narrow,
        )  # fmt: skip
        self._branch(layer.down, Buffer.HIDDEN, layer.after_feed_forward)

    def _branch(self, linear: nn.Linear, source: Buffer, norm: Any) -> None:
        """residual += linear(source), normalised first if there is a norm."""
        program = self._runner._program
        bias, (weight, narrow) = self._bias([linear]), self._pack([linear])
        if norm is None:
            program.linear(weight, source, Buffer.RESIDUAL, bias=bias, add=True, narrow=narrow)
        else:
            program.linear(weight, source, Buffer.BRANCH, bias=bias, narrow=narrow)
            program.add_norm(self._norm(norm))

    def _pack(
        self, linears: list[Any], *, interleaved: bool = False, tied: str | None = None
    ) -> tuple[PackedWeight, PackedWeight | None]:
        """Weights of layers with one input, below one another, or as 16 gates, their 16 values, the next 16, ...

        The narrow copy comes second, if there is one.
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
                    self._runner.place(name, tuple(linear.weight.shape), _filling(one, outputs))
            if not tied:  # one by one, so that no more than a layer is held twice
                linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self._runner.weight_bytes += packed.bytes
        self._runner.draft_bytes += (narrow or packed).bytes
        return packed, narrow

    def _screen(self, head: nn.Linear, tied: str | None) -> Screen | None:
        """A narrow copy of the head, where that is worth its memory."""
        outputs, inputs = head.weight.shape
        if self._format not in (Format.FLOAT32, Format.BFLOAT16) or outputs < SCREENED:
            return None
        screen, everything = Screen(outputs, inputs), torch.arange(outputs)
        own = torch.bfloat16 if self._format == Format.BFLOAT16 else torch.float32

        def fill(weight: Tensor) -> None:
            screen.fill(everything, weight.detach().to(own))

        fill(head.weight)
        self._runner.place((tied or self._names[id(head)]) + ".weight", (outputs, inputs), fill)
        return screen

    def _bias(self, linears: list[Any]) -> Tensor | None:
        """Biases of layers with one input; None if no one has any."""
        if all(linear.bias is None for linear in linears):
            return None
        counts = [linear.out_features for linear in linears]
        bias = torch.zeros(sum(counts))
        for part, linear in zip(bias.split(counts), linears, strict=True):
            if linear.bias is not None:
                part.copy_(linear.bias)
                self._runner.place(self._names[id(linear)] + ".bias", tuple(part.shape), part.copy_)
        return bias

    def _norm(self, module: Any) -> Norm:
        shift = decoder.norm_shift(self._config)
        weight = module.weight.detach().float() + shift
        self._runner.place(
            self._names[id(module)] + ".weight", tuple(weight.shape), lambda new: weight.copy_(new.float() + shift)
        )
        return Norm(weight, decoder.norm_epsilon(module))


def _filling(packed: PackedWeight, outputs: Tensor) -> Callable[[Tensor], object]:
    return lambda weight: packed.fill(outputs, weight)
