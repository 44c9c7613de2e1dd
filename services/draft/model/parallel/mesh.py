"""A draft model over several devices (--draft-tp-size): every layer is split, and all devices work on all rows.

    attention        its heads, with the keys and values that they read in the cache; a key-value head that several
                     devices read lies on each of them; a latent cache lies on all
    feed-forward     the numbers between its projections; of every expert, too, so that each device has as much to do
                     whichever experts are chosen
    head             its entries; where the embedding is the head, they are its tokens
    embedding, join  the numbers of a state; also of the states that the cache keeps

A device computes its part of each and then they exchange: states are added behind attention and behind the feed-forward
part, and logits are put side by side. What a number of devices does not divide lies on all of them, which all compute
it: routers, norms, the small projections of latent attention, and any part with an odd number of heads or columns.

Joined matrices are put in the devices' order first: each has its own queries, keys and values, or its own gate and up
columns, side by side, so that the layers' functions are the same for a part as for the whole.
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
from services.draft.model.layers.heads import Params
from services.draft.model.layers.kv_cache import Pools, make_pools
from services.draft.model.matrices.narrow import Narrow
from services.draft.model.matrices.parts import AXIS, Joined, Summed

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

_NOBODY = 2**31 - 1  # the token of an entry that pads the head


@dataclass(frozen=True)
class Spread:
    """Devices, and where the arrays of a model lie on them; a static argument of the programs.

    params, pools: of each leaf in order, how it is split
    """

    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    pools: tuple[PartitionSpec, ...]

    @property
    def devices(self) -> int:
        """How many there are."""
        return int(self.mesh.size)

    def step(
        self, function: Callable[..., tuple[_T, Pools]], params: Params, pools: Pools, inputs: Any
    ) -> tuple[_T, Pools]:
        """What all devices say alike, and the pools. function: of a device's parts and the inputs."""
        layout = _like(pools, self.pools)
        specs = (_like(params, self.params), layout, PartitionSpec())
        return self._mapped(function, specs, (PartitionSpec(), layout))(params, pools, inputs)

    def change(self, function: Callable[..., Pools], pools: Pools, inputs: Any) -> Pools:
        """The pools after something that each device does with its own part."""
        layout = _like(pools, self.pools)
        return self._mapped(function, (layout, PartitionSpec()), layout)(pools, inputs)

    def make_pools(self, part: ModelConfig, total_pages: int, page_size: int, dtype: Any) -> Pools:
        """Empty pools on the devices. part: a device's part of the model."""

        def make() -> Pools:
            pools = make_pools(part, total_pages, page_size, dtype)
            if pools.features is None or not self.pools[-1]:
                return pools
            assert isinstance(pools.features, jax.Array)
            return pools._replace(features=Joined(pools.features[:, : part.hidden_size // self.devices]))

        return jax.jit(self._mapped(make, (), _like(jax.eval_shape(make), self.pools)))()

    def cache_numbers(self, part: ModelConfig) -> int:
        """Numbers that a device's caches keep a token."""
        states = part.hidden_size if part.head.fed else 0
        return part.cache_numbers() - (states - states // self.devices if states and self.pools[-1] else 0)

    def _mapped(self, function: Callable[..., _R], specs: Any, results: Any) -> Callable[..., _R]:
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)


def _like(tree: Any, specs: tuple[PartitionSpec, ...]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), specs)


@dataclass(frozen=True)
class Cut:
    """How an array is split. axis: counted from the last, -1; order: of its entries before it is cut evenly."""

    axis: int
    order: NDArray[np.intp] | None = None
    wrap: type[Joined] | type[Summed] | None = None


Cuts = dict[str, Cut]


def spread_over(
    devices: Sequence[jax.Device], config: ModelConfig, params: Params
) -> tuple[ModelConfig, Params, Spread]:
    """A device's part of the model, its parameters on the devices, and where they lie.

    params: of the whole model; they may lie on any device.
    """
    count = len(devices)
    mesh = Mesh(np.array(devices), (AXIS,))
    cut_layers = [_cut_layer(layer, count) for layer in config.layers]
    part = replace(config, layers=tuple(layer for layer, _ in cut_layers))
    _say_what_is_whole(config, part)
    states = Cut(-1, wrap=Joined) if config.hidden_size % count == 0 else None
    cuts: dict[str, Cut] = {"head": Cut(-1, wrap=Joined)}
    if states is not None:
        cuts |= {"embed": states, "fuse": states}
    padded = _with_padded_head(params, config.vocab_size, count)
    spread: Params = {}
    for name, value in padded.items():
        if name == "layers":
            layers = zip(value, cut_layers, strict=True)
            spread[name] = [_put_all(layer, cuts_of_it, mesh) for layer, (_, cuts_of_it) in layers]
        elif name == "joins":
            spread[name] = [_put_all(join, cuts, mesh) for join in value]
        else:
            spread[name] = _put(value, cuts.get(name), mesh)
    specs = tuple(leaf.sharding.spec for leaf in jax.tree.leaves(spread))
    return part, spread, Spread(mesh, specs, _pool_specs(config, part, split_states=states is not None))


def _say_what_is_whole(whole: ModelConfig, part: ModelConfig) -> None:
    for old, new in zip(whole.layers, part.layers, strict=True):
        for name, old_part, new_part in (
            ("attention", old.attention, new.attention),
            ("feed-forward", old.mlp, new.mlp),
        ):
            if old_part == new_part:
                log.warning("--draft-tp-size does not divide %s; all devices compute it", name)
        return  # of all layers alike


# --- layers ---


def _cut_layer(layer: Layer, count: int) -> tuple[Layer, Cuts]:
    """A device's part of a layer, and how its arrays are split."""
    attention, cuts = (
        _cut_latent(layer.attention, count)
        if isinstance(layer.attention, LatentAttention)
        else _cut_attention(layer.attention, count)
    )
    if isinstance(layer.mlp, Experts):
        mlp, further = _cut_experts(layer.mlp, count)
        return replace(layer, attention=attention, mlp=mlp), cuts | further
    dense, further = _cut_mlp(layer.mlp, count)
    return replace(layer, attention=attention, mlp=dense), cuts | further


def _cut_attention(a: Attention, count: int) -> tuple[Attention, Cuts]:
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
    columns = Cut(-1, order)
    cuts = {"qkv": columns, "qkv_bias": columns, "output": Cut(-2, wrap=Summed), "sinks": Cut(-1)}
    return replace(a, heads=heads, kv_heads=kv_heads), cuts


def _cut_latent(a: LatentAttention, count: int) -> tuple[LatentAttention, Cuts]:
    if a.heads % count:
        return a, {}
    cuts = {"query": Cut(-1), "keys": Cut(-3), "values": Cut(-3), "output": Cut(-2, wrap=Summed)}
    return replace(a, heads=a.heads // count), cuts


def _cut_mlp(mlp: Mlp, count: int) -> tuple[Mlp, Cuts]:
    if mlp.width % count:
        return mlp, {}
    return replace(mlp, width=mlp.width // count), _gated_cuts(mlp.width, count)


def _cut_experts(e: Experts, count: int) -> tuple[Experts, Cuts]:
    if e.width % count or e.shared % count:
        return e, {}
    cuts = _gated_cuts(e.width, count, "experts_")
    if e.shared:
        cuts |= _gated_cuts(e.shared, count, "shared_")
    return replace(e, width=e.width // count, shared=e.shared // count), cuts


def _gated_cuts(width: int, count: int, name: str = "") -> Cuts:
    """Gate and up columns stand side by side; each device gets its own of both."""
    each = np.arange(width).reshape(count, 1, -1)
    columns = Cut(-1, np.concatenate([each, width + each], axis=1).reshape(-1))
    return {
        f"{name}gate_up": columns,
        f"{name}gate_up_bias": columns,
        f"{name}down": Cut(-2, wrap=Summed),
    }


# --- arrays ---


def _with_padded_head(params: Params, entries: int, count: int) -> Params:
    """The head with entries of nobody at its end, so that the devices have equally many."""
    padding = -entries % count
    if not padding:
        return params

    def pad(array: Any) -> Any:
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padding)])

    ids = params.get("ids", jnp.arange(entries, dtype=jnp.int32))
    return params | {
        "head": jax.tree.map(pad, params["head"]),
        "ids": jnp.pad(ids, (0, padding), constant_values=_NOBODY),
    }


def _put_all(params: Params, cuts: Cuts, mesh: Mesh) -> Params:
    return {name: _put(value, cuts.get(name), mesh) for name, value in params.items()}


def _put(value: Any, cut: Cut | None, mesh: Mesh) -> Any:
    """A matrix or an array on the devices: in parts, or whole on each of them."""
    if cut is None:
        return jax.tree.map(
            lambda array: jax.device_put(np.asarray(array), NamedSharding(mesh, PartitionSpec())), value
        )
    if isinstance(value, Narrow):
        scales = cut if cut.axis == -1 else None
        placed: Any = Narrow(_cut(value.numbers, cut, mesh), _cut(value.scales, scales, mesh))
    else:
        placed = _cut(value, cut, mesh)
    return placed if cut.wrap is None else cut.wrap(placed)


def _cut(array: jax.Array, cut: Cut | None, mesh: Mesh) -> jax.Array:
    host = np.asarray(array)  # so that no device holds all of it
    spec = PartitionSpec()
    if cut is not None:
        if cut.order is not None:
            host = np.take(host, cut.order, axis=cut.axis)
        spec = PartitionSpec(*[None] * (host.ndim + cut.axis), AXIS)
    return jax.device_put(host, NamedSharding(mesh, spec))


# --- pools ---


def _pool_specs(whole: ModelConfig, part: ModelConfig, *, split_states: bool) -> tuple[PartitionSpec, ...]:
    specs = [
        PartitionSpec() if own.attention.kv_shape == layer.attention.kv_shape else PartitionSpec(None, None, AXIS)
        for own, layer in zip(part.layers, whole.layers, strict=True)
    ]
    if whole.head.fed:
        specs.append(PartitionSpec(None, AXIS) if split_states else PartitionSpec())
    return tuple(specs)
