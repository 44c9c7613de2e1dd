"""Makes a model that `transformers` has divided among ranks compute with plain tensors.

`transformers` reads a rank's parts as DTensors and wraps the layers in conversions from and to them, which cost more
host time than a small step has. Here the parts become plain parameters, and the layers get hooks for the exchanges:

    style of the plan                       what follows
    colwise, packed_colwise, ...            nothing: the next layer takes this rank's part of the columns
    rowwise, moe_tp_experts, all_reduce     the sum of all ranks' results
    colwise_rep, colwise_gather_output      all ranks' columns side by side
    embedding_rowwise                       zeros for tokens of other ranks, and the sum

So packed weights, fused kernels, latent attention, CUDA graphs and weight updates see an ordinary, narrower model. The
first rank alone keeps the bias of a layer whose results are summed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outrider.errors import ConfigError
from services.target.model.parallel.exchange import join_columns, sum_of_ranks
from services.target.model.parallel.shard import Shard

_MARK = "_outrider_shards"
_LAYER_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_LOCAL = {
    "colwise", "packed_colwise", "packed_rowwise", "local_params", "replicate", "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
}  # fmt: skip
_SUMMED = {"rowwise", "moe_tp_experts", "all_reduce"}
_SUMMED_FROM_WHOLE_INPUT = {"rowwise_rep", "rowwise_split_input"}
_JOINED = {"colwise_rep", "colwise_gather_output"}


def install(module: Any) -> None:
    """Give a model that was loaded in parts plain parameters and hooks. Raises ConfigError for an unknown style."""
    plan: Mapping[str, str] = module.tp_plan
    shards = _localize(module)
    for name, child in module.named_modules():
        style = plan.get(_LAYER_NUMBER.sub(".*", name))
        if style is not None:
            child.__dict__.pop("forward", None)  # the conversions of `transformers`
            _exchange(name, child, style, shards.get(f"{name}.weight"))
    setattr(module, _MARK, shards)


def shards_of(module: nn.Module) -> Mapping[str, Shard]:
    """The parts that this rank holds, by parameter name; empty for a model that is not divided."""
    shards: Mapping[str, Shard] = module.__dict__.get(_MARK, {})
    return shards


def is_split(module: nn.Module) -> bool:
    """True if the model is divided among ranks."""
    return _MARK in module.__dict__


def whole_rows(module: nn.Module, linear: nn.Module) -> int:
    """The outputs of a linear layer of the model, those of other ranks included."""
    name = next(name for name, child in module.named_modules() if child is linear)
    shard = shards_of(module).get(f"{name}.weight")
    rows: int = linear.get_parameter("weight").shape[0] if shard is None or shard.dim else shard.size
    return rows


def shard_of(tensor: Tensor) -> Shard | None:
    """This rank's part of a tensor of `transformers`' plan; None for one that every rank holds."""
    if not isinstance(tensor, DTensor):
        return None
    (placement,) = tensor.placements
    if not hasattr(placement, "dim"):
        return None
    dim, groups = placement.dim % tensor.ndim, int(getattr(placement, "split_factor", 1))
    size = tensor.shape[dim]
    if size % groups:
        raise ConfigError(f"{size} rows of experts are not {groups} equal matrices; start without --tp-size")
    width = -(-size // groups // dist.get_world_size())
    start = min(dist.get_rank() * width, size // groups)
    return Shard(dim, size, groups, start, min(start + width, size // groups))


def _localize(module: nn.Module) -> dict[str, Shard]:
    """Replace all DTensors by the parts in them. Returns which parts these are, by name."""
    shards: dict[str, Shard] = {}
    made: dict[int, nn.Parameter] = {}  # by the replaced one's id, so that tied parameters remain one
    for prefix, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if not isinstance(parameter, DTensor):
                continue
            shard = shard_of(parameter)
            if id(parameter) not in made:
                local = parameter.to_local().detach()
                assert shard is None or shard.whole_shape(tuple(local.shape)) == tuple(parameter.shape)
                made[id(parameter)] = nn.Parameter(local.contiguous(), requires_grad=False)
            child._parameters[name] = made[id(parameter)]
            if shard is not None:
                shards[f"{prefix}.{name}" if prefix else name] = shard
        if isinstance(child, nn.Linear) and isinstance(child.weight, nn.Parameter):
            child.out_features, child.in_features = child.weight.shape
    return shards


def _exchange(name: str, child: Any, style: str, shard: Shard | None) -> None:
    """Add the exchanges of a layer. shard: of its weight."""
    if style in _LOCAL:
        return
    if style in _SUMMED or style in _SUMMED_FROM_WHOLE_INPUT:
        _keep_one_bias(name, child)
        if style in _SUMMED_FROM_WHOLE_INPUT and shard is not None:
            child.register_forward_pre_hook(partial(_own_columns, shard))
        child.register_forward_hook(_sum)
    elif style in _JOINED and shard is not None:
        child.register_forward_hook(partial(_join, shard.size))
    elif style == "embedding_rowwise" and shard is not None:
        child.padding_idx = None  # only gradients need it
        tokens = _OwnTokens(shard)
        child.register_forward_pre_hook(tokens.enter)
        child.register_forward_hook(tokens.leave)
    elif style == "embedding_colwise" and shard is not None:
        child.register_forward_hook(partial(_join, shard.size))
    elif style == "moe_identity_expert":
        child.register_forward_pre_hook(_divide)
    else:
        raise ConfigError(
            f"transformers divides {name} in the style {style}, which is not supported; start without --tp-size"
        )


def _keep_one_bias(name: str, child: Any) -> None:
    """The results of a layer are summed, its bias must be added once: the first rank keeps it."""
    if isinstance(child, nn.Linear):
        if dist.get_rank() > 0 and child.bias is not None:
            child.register_parameter("bias", None)
    elif any(part.endswith("bias") for part, _ in child.named_parameters()):
        raise ConfigError(f"{name} has biases that each rank would add; start without --tp-size")


def _sum(_: nn.Module, __: Any, output: Any) -> Any:
    return sum_of_ranks(output)


def _join(columns: int, _: nn.Module, __: Any, output: Any) -> Any:
    return join_columns(output, columns)


def _own_columns(shard: Shard, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = arguments
    return (x[..., shard.start : shard.stop], *others)


def _divide(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    x, *others = arguments
    return (x / dist.get_world_size(), *others)


class _OwnTokens:
    """Lets an embedding see only the tokens of this rank's rows; the others' vectors are zeros before the sum."""

    def __init__(self, shard: Shard) -> None:
        self._start, self._count = shard.start, shard.stop - shard.start
        self._others: Tensor | None = None  # of the pass under way, the tokens of other ranks

    def enter(self, _: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The rows of this rank's tokens."""
        rows = arguments[0] - self._start
        self._others = (rows < 0) | (rows >= self._count)
        return (rows.masked_fill(self._others, 0), *arguments[1:])

    def leave(self, _: nn.Module, __: Any, vectors: Tensor) -> Tensor:
        """The vectors of all tokens."""
        assert self._others is not None, "it was entered"
        return sum_of_ranks(vectors.masked_fill(self._others[..., None], 0))
