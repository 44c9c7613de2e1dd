"""Tensor parallelism of a draft model (--draft-tp-size): every layer is sharded over a device mesh.

    attention        by heads, with their keys and values in the cache; a key-value head that several devices read is
                     replicated on them; a latent cache is replicated on all
    feed-forward     by the inner dimension, also of every expert, so that the devices have equal work for any choice of
                     experts
    head             by its entries; where the embedding is the head, by tokens
    embedding,       by the hidden dimension, as the features in the cache
    fusion

Each device computes its shard, and then they exchange: states are summed behind attention and behind the feed-forward
part, and logits are concatenated. Parts whose size is not divisible by the number of devices are replicated, as are
routers, norms and the small projections of latent attention.

Joined matrices are reordered first: each device has its own queries, keys and values, or its own gate and up columns,
side by side, so that the layers' functions are the same for a shard as for the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from services.draft.model.layers.config import Attention, Experts, LatentAttention, Layer, Mlp, ModelConfig
from services.draft.model.layers.kv_cache import Pools, make_pools
from services.draft.model.matrices.quantized import QuantizedWeight
from services.draft.model.matrices.sharded import AXIS, ColumnSharded, RowSharded
from services.draft.model.params import Params

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

_PADDING_ID = 2**31 - 1  # the token id of entries that pad the head


@dataclass(frozen=True)
class MeshPlacement:
    """A device mesh, and how the arrays of a model are sharded over it; a static argument of the programs.

    params, pools: partition of each leaf in order
    """

    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    pools: tuple[PartitionSpec, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return int(self.mesh.size)

    def step(
        self, function: Callable[..., tuple[_T, Pools]], params: Params, pools: Pools, inputs: Any
    ) -> tuple[_T, Pools]:
        """The replicated result of a function, and the pools. function: of a device's shards and the inputs."""
        layout = _like(pools, self.pools)
        specs = (_like(params, self.params), layout, PartitionSpec())
        return self._mapped(function, specs, (PartitionSpec(), layout))(params, pools, inputs)

    def change(self, function: Callable[..., Pools], pools: Pools, inputs: Any) -> Pools:
        """The pools after a function that each device applies to its own shard."""
        layout = _like(pools, self.pools)
        return self._mapped(function, (layout, PartitionSpec()), layout)(pools, inputs)

    def make_pools(self, part: ModelConfig, total_pages: int, page_size: int, dtype: Any) -> Pools:
        """Empty pools on the devices. part: a device's part of the model."""

        def make() -> Pools:
            pools = make_pools(part, total_pages, page_size, dtype)
            if pools.features is None or not self.pools[-1]:
                return pools
            assert isinstance(pools.features, jax.Array)
            return pools._replace(features=ColumnSharded(pools.features[:, : part.hidden_size // self.devices]))

        pools: Pools = jax.jit(self._mapped(make, (), _like(jax.eval_shape(make), self.pools)))()
        return pools

    def cache_numbers(self, part: ModelConfig) -> int:
        """Elements that a device's caches keep for a token."""
        states = part.hidden_size if part.head.keeps_states else 0
        return part.cache_numbers() - (states - states // self.devices if states and self.pools[-1] else 0)

    def _mapped(self, function: Callable[..., _R], specs: Any, results: Any) -> Callable[..., _R]:
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)


def _like(tree: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


@dataclass(frozen=True)
class ShardSpec:
    """How an array is sharded. axis: counted from the end, from -1; order: of its entries before the even split."""

    axis: int
    order: NDArray[np.intp] | None = None
    wrap: type[ColumnSharded] | type[RowSharded] | None = None


ShardSpecs = dict[str, ShardSpec]


def place_on_mesh(
    devices: Sequence[jax.Device], config: ModelConfig, params: Params
) -> tuple[ModelConfig, Params, MeshPlacement]:
    """A device's part of the model, its parameters on the devices, and their placement.

    params: of the whole model, on any device.
    """
    count = len(devices)
    mesh = Mesh(np.array(devices), (AXIS,))
    sharded_layers = [_shard_layer(layer, count) for layer in config.layers]
    part = replace(config, layers=tuple(layer for layer, _ in sharded_layers))
    _warn_of_replicas(config, part)
    states = ShardSpec(-1, wrap=ColumnSharded) if config.hidden_size % count == 0 else None
    shards: dict[str, ShardSpec] = {"head": ShardSpec(-1, wrap=ColumnSharded)}
    if states is not None:
        shards |= {"embed": states, "fuse": states}
    padded = _with_padded_head(params, config.vocab_size, count)
    placed: Params = {}
    for name, value in padded.items():
        if name == "layers":
            layers = zip(value, sharded_layers, strict=True)
            placed[name] = [_put_all(layer, own_shards, mesh) for layer, (_, own_shards) in layers]
        elif name == "joins":
            placed[name] = [_put_all(join, shards, mesh) for join in value]
        else:
            placed[name] = _put(value, shards.get(name), mesh)
    specs = tuple(leaf.sharding.spec for leaf in jax.tree.leaves(placed))
    return part, placed, MeshPlacement(mesh, specs, _pool_specs(config, part, split_states=states is not None))


def _warn_of_replicas(whole: ModelConfig, part: ModelConfig) -> None:
    for old, new in zip(whole.layers, part.layers, strict=True):
        for name, old_part, new_part in (
            ("attention", old.attention, new.attention),
            ("feed-forward", old.mlp, new.mlp),
        ):
            if old_part == new_part:
                log.warning("--draft-tp-size does not divide %s; all devices compute it", name)
        return  # all layers are alike


# --- layers ---


def _shard_layer(layer: Layer, count: int) -> tuple[Layer, ShardSpecs]:
    """A device's part of a layer, and how its arrays are sharded."""
    attention, shards = (
        _shard_latent(layer.attention, count)
        if isinstance(layer.attention, LatentAttention)
        else _shard_attention(layer.attention, count)
    )
    if isinstance(layer.mlp, Experts):
        mlp, further = _shard_experts(layer.mlp, count)
        return replace(layer, attention=attention, mlp=mlp), shards | further
    dense, further = _shard_mlp(layer.mlp, count)
    return replace(layer, attention=attention, mlp=dense), shards | further


def _shard_attention(a: Attention, count: int) -> tuple[Attention, ShardSpecs]:
    if a.heads % count or (a.kv_heads % count and count % a.kv_heads):
        return a, {}
    heads, kv_heads = a.heads // count, max(a.kv_heads // count, 1)
    blocks: list[NDArray[np.intp]] = []
    for device in range(count):
        own = np.arange(device * heads, (device + 1) * heads)
        read = device * a.kv_heads // count + np.arange(kv_heads)
        blocks += [own, a.heads + read, a.heads + a.kv_heads + read]
        if a.gated:
            blocks.append(a.heads + 2 * a.kv_heads + own)
    order = (np.concatenate(blocks)[:, None] * a.head_dim + np.arange(a.head_dim)).reshape(-1)
    columns = ShardSpec(-1, order)
    shards = {"qkv": columns, "qkv_bias": columns, "output": ShardSpec(-2, wrap=RowSharded), "sinks": ShardSpec(-1)}
    return replace(a, heads=heads, kv_heads=kv_heads), shards


def _shard_latent(a: LatentAttention, count: int) -> tuple[LatentAttention, ShardSpecs]:
    if a.heads % count:
        return a, {}
    shards = {
        "query": ShardSpec(-1),
        "keys": ShardSpec(-3),
        "values": ShardSpec(-3),
        "output": ShardSpec(-2, wrap=RowSharded),
    }
    return replace(a, heads=a.heads // count), shards


def _shard_mlp(mlp: Mlp, count: int) -> tuple[Mlp, ShardSpecs]:
    if mlp.width % count:
        return mlp, {}
    return replace(mlp, width=mlp.width // count), _gated_shards(mlp.width, count)


def _shard_experts(e: Experts, count: int) -> tuple[Experts, ShardSpecs]:
    if e.width % count or e.shared % count:
        return e, {}
    shards = _gated_shards(e.width, count, "experts_")
    if e.shared:
        shards |= _gated_shards(e.shared, count, "shared_")
    return replace(e, width=e.width // count, shared=e.shared // count), shards


def _gated_shards(width: int, count: int, name: str = "") -> ShardSpecs:
    """Gate and up columns stand side by side; each device gets its own columns of both."""
    each = np.arange(width).reshape(count, 1, -1)
    columns = ShardSpec(-1, np.concatenate([each, width + each], axis=1).reshape(-1))
    return {
        f"{name}gate_up": columns,
        f"{name}gate_up_bias": columns,
        f"{name}down": ShardSpec(-2, wrap=RowSharded),
    }


# --- arrays ---


def _with_padded_head(params: Params, entries: int, count: int) -> Params:
    """The head with padding entries at its end, so that all devices have equally many."""
    padding = -entries % count
    if not padding:
        return params

    def pad(array: Any) -> Any:
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)])

    ids = params.get("ids", jnp.arange(entries, dtype=jnp.int32))
    return params | {
        "head": jax.tree.map(pad, params["head"]),
        "ids": jnp.pad(ids, (0, padding), constant_values=_PADDING_ID),
    }


def _put_all(params: Params, shards: ShardSpecs, mesh: Mesh) -> Params:
    return {name: _put(value, shards.get(name), mesh) for name, value in params.items()}


def _put(value: Any, shard: ShardSpec | None, mesh: Mesh) -> Any:
    """A matrix or an array on the devices: sharded, or replicated."""
    if shard is None:
        return jax.tree.map(
            lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, PartitionSpec())), value
        )
    if isinstance(value, QuantizedWeight):
        scales = shard if shard.axis == -1 else None
        placed: Any = QuantizedWeight(_shard(value.numbers, shard, mesh), _shard(value.scales, scales, mesh))
    else:
        placed = _shard(value, shard, mesh)
    return placed if shard.wrap is None else shard.wrap(placed)


def _shard(array: jax.Array, shard: ShardSpec | None, mesh: Mesh) -> jax.Array:
    host = np.asarray(array)  # so that no device holds the whole array
    spec = PartitionSpec()
    if shard is not None:
        if shard.order is not None:
            host = np.take(host, shard.order, axis=shard.axis)
        spec = PartitionSpec(*[None] * (host.ndim + shard.axis), AXIS)
    placed: jax.Array = jax.device_put(host, NamedSharding(mesh, spec))
    return placed


# --- pools ---


def _pool_specs(whole: ModelConfig, part: ModelConfig, *, split_states: bool) -> tuple[PartitionSpec, ...]:
    specs = [
        PartitionSpec() if own.attention.kv_shape == layer.attention.kv_shape else PartitionSpec(None, None, AXIS)
        for own, layer in zip(part.layers, whole.layers, strict=True)
    ]
    specs += [PartitionSpec()] * whole.chain_links
    if whole.head.keeps_states:
        specs.append(PartitionSpec(None, AXIS) if split_states else PartitionSpec())
    return tuple(specs)
