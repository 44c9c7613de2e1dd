"""Dense decoders (decoder.py) on CUDA in few launches: products with one input are merged, and the rest is fused.

A layer of seven products and about twenty small operations becomes four products, two norms, a rotation and attention:

    norm > queries, keys, values > rotate and store > attention > output > sum and norm > gates and values > down > sum

The parameters of `transformers` become views of the merged weights, so a write to a parameter changes these. With
tensor parallelism this rank's parts are merged, and the sums over ranks follow the output and down products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.target.kernels.cuda import fused_elementwise, small_batch_matmul
from services.target.kernels.cuda.fused_elementwise import Norm, add_norm, rotate_and_store
from services.target.kernels.dispatch import Attention, Planner
from services.target.kernels.kv_cache import KVCache
from services.target.model import decoder
from services.target.model.attention import Probe
from services.target.model.base import Outputs
from services.target.model.capture import joined
from services.target.model.modules import ModuleRunner
from services.target.model.parallel.exchange import join_columns, sum_of_ranks
from services.target.model.parallel.split import is_split, shards_of
from services.target.step.batch import Batch, Capture
from services.target.step.upload import upload

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Exchange = Callable[[Tensor], Tensor]


def unsupported_reason(module: Any) -> str | None:
    """Why a model on CUDA runs module by module; None if it can be fused."""
    if (against := decoder.unsupported_reason(module)) is not None:
        return against
    linears = [part for part in module.model.layers.modules() if isinstance(part, nn.Linear)]
    linears.append(module.lm_head)
    if any(type(linear.weight.data) is not Tensor or linear.weight.dtype not in _DTYPES for linear in linears):
        return "its weights have a quantized format"
    if module.model.layers[0].self_attn.head_dim % 2:
        return "its head dimension is odd"
    return None


@dataclass(frozen=True)
class _Linear:
    """weight: [outputs, inputs]; bias: [outputs]."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class _Layer:
    before_attention: Norm
    projections: _Linear
    head_norms: tuple[Norm, Norm] | None
    tables: tuple[Tensor, Tensor]
    attending: dict[str, Any]  # how
    output: _Linear
    after_attention: Norm | None
    before_feed_forward: Norm
    gates: Tensor  # [2 * width, inputs], gates above values
    down: _Linear
    after_feed_forward: Norm | None


class FusedRunner(ModuleRunner):
    """Runs a model for which there is no `unsupported_reason`. Results are those of its modules but for rounding."""

    compilable = False

    def __init__(self, module: Any, planner: Planner, probe: Probe, positions: int) -> None:
        """probe: has seen a token pass; positions: most tokens of a session."""
        super().__init__(module, planner)
        self._model, config = module.model, module.config
        self._heads = (probe.calls[0].q.shape[1], probe.calls[0].k.shape[1])
        self._gelu = decoder.activation(config) != "silu"
        self._softcap = decoder.final_softcap(config)
        self._shift = decoder.norm_shift(config)
        rotary = decoder.RotaryTables(module, positions, self._model.embed_tokens.weight.device)
        self._layers = [
            self._layer(decoder.parts(layer), rotary.of(index), probe, index)
            for index, layer in enumerate(self._model.layers)
        ]
        self._norm, self._head = self._norm_of(self._model.norm), _Linear(module.lm_head.weight, module.lm_head.bias)
        self._sum, self._join = _exchanges(module)

    def _layer(self, parts: decoder.LayerModules, tables: tuple[Tensor, Tensor], probe: Probe, index: int) -> _Layer:
        call = probe.calls[index]
        norms = [self._norm_of(norm) for norm in (parts.query_norm, parts.key_norm) if norm is not None]
        after = (parts.after_attention, parts.after_feed_forward)
        return _Layer(
            self._norm_of(parts.before_attention),
            _beside(parts.projections),
            (norms[0], norms[1]) if norms else None,
            tables,
            {"scaling": call.scaling, "window": call.window, "softcap": call.softcap, "sinks": call.sinks},
            _beside([parts.output]),
            None if after[0] is None else self._norm_of(after[0]),
            self._norm_of(parts.before_feed_forward),
            _beside([parts.gate, parts.up]).weight,
            _beside([parts.down]),
            None if after[1] is None else self._norm_of(after[1]),
        )

    def _norm_of(self, module: Any) -> Norm:
        return Norm(module.weight, decoder.norm_epsilon(module), self._shift)

    def run(self, batch: Batch, cache: KVCache, planner: Planner) -> Outputs:
        """As `ModuleRunner.run`."""
        attention, states = planner(batch), _States(batch.capture, batch.device)
        stream = self._model.embed_tokens(batch.ids)
        branch: Tensor | None = None
        after: Norm | None = None
        for index, layer in enumerate(self._layers):
            normed = add_norm(stream, branch, layer.before_attention, after)
            states.pass_by(index, stream)
            branch = self._attend(index, layer, normed, batch, cache, attention)
            normed = add_norm(stream, branch, layer.before_feed_forward, layer.after_attention)
            branch = self._sum(_linear(_gated(normed, layer.gates, gelu=self._gelu), layer.down))
            after = layer.after_feed_forward
        normed = add_norm(stream, branch, self._norm, after)
        states.pass_by(len(self._layers), stream)
        logits = self._join(_linear(normed.index_select(0, batch.sampled), self._head))
        if self._softcap:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return Outputs(logits, states.features(normed))

    def _attend(
        self, index: int, layer: _Layer, normed: Tensor, batch: Batch, cache: KVCache, attention: Attention
    ) -> Tensor:
        pools = cache.keys[index], cache.values[index]
        where = self._heads, batch.positions, batch.slots, layer.tables, pools
        weight, bias = layer.projections.weight, layer.projections.bias
        if (
            layer.head_norms is None
            and small_batch_matmul.serves(normed, weight)
            and small_batch_matmul.serves_rotary(self._heads, weight)
        ):
            queries = small_batch_matmul.linear_rotary(normed, weight, bias, *where, early=True)
        else:
            queries = rotate_and_store(_linear(normed, layer.projections, early=True), *where, layer.head_norms)
        attended = attention(queries, *pools, **layer.attending)
        return self._sum(_linear(attended.flatten(1), layer.output))


def _exchanges(module: Any) -> tuple[Exchange, Exchange]:
    """What follows layers whose inputs are divided among ranks, and the LM head."""
    shard = shards_of(module).get("lm_head.weight")
    columns = partial(join_columns, size=shard.size) if shard is not None else _unchanged
    return sum_of_ranks if is_split(module) else _unchanged, columns


def _unchanged(whole: Tensor) -> Tensor:
    return whole


class _States:
    """The captured hidden states of a forward pass; see Capture."""

    def __init__(self, capture: Capture | None, device: torch.device) -> None:
        self._capture = capture
        self._taken: list[Tensor] = []
        self._rows: Tensor | None = None
        if capture is not None and capture.rows is not None:
            [self._rows] = upload([capture.rows], device)

    def pass_by(self, layer: int, stream: Tensor) -> None:
        """Capture the residual stream before a layer, or after the last one; later layers change it in place."""
        if self._capture is not None and layer in self._capture.layers:
            self._taken.append(self._of(stream, copied=True))

    def features(self, final: Tensor) -> Tensor | None:
        """States side by side, lowest layer first; None without a capture. final: the normalised last state."""
        if self._capture is None:
            return None
        return joined([*self._taken, self._of(final)] if self._capture.final else self._taken)

    def _of(self, stream: Tensor, *, copied: bool = False) -> Tensor:
        if self._rows is not None:
            return stream.index_select(0, self._rows)
        return stream.clone() if copied else stream


def _beside(linears: Sequence[Any]) -> _Linear:
    """Merge layers with one input into one; their parameters become views of its weight."""
    weights = [linear.weight for linear in linears]
    whole = weights[0].data if len(linears) == 1 else torch.cat([weight.data for weight in weights])
    counts = [len(weight) for weight in weights]
    for linear, part in zip(linears, whole.split(counts), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    if all(linear.bias is None for linear in linears):
        return _Linear(whole, None)
    bias = whole.new_zeros(sum(counts))
    for linear, own in zip(linears, bias.split(counts), strict=True):
        if linear.bias is not None:
            own.copy_(linear.bias)
            linear.bias = nn.Parameter(own, requires_grad=False)
    return _Linear(whole, bias)


def _linear(x: Tensor, layer: _Linear, *, early: bool = False) -> Tensor:
    if small_batch_matmul.serves(x, layer.weight):
        return small_batch_matmul.linear(x, layer.weight, layer.bias, early=early)
    return functional.linear(x, layer.weight, layer.bias)


def _gated(x: Tensor, gates: Tensor, *, gelu: bool) -> Tensor:
    if small_batch_matmul.serves(x, gates):
        return small_batch_matmul.gated(x, gates, gelu=gelu, early=True)
    return fused_elementwise.gated(functional.linear(x, gates), gelu=gelu)
