"""A step of a one-layer head as a traced program, and the check that it updates its pools in place."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from services.draft.model.layers.config import Layer, Mlp, ModelConfig
from services.draft.model.layers.heads import Eagle3Head
from services.draft.model.layers.kv_cache import make_pools
from services.draft.model.programs import program
from services.draft.sessions.batch import InputLayout

SLOTS = 65_536  # of the pools


def head_of(attention):
    """A narrow EAGLE-3 head around attention of real size."""
    hidden = attention.width // 2
    layer = Layer(attention, Mlp(256), 1e-5, beside=True)
    return ModelConfig("EAGLE3", 1000, hidden, (layer,), 8192, Eagle3Head(1e-5))


def step_of(config, paging, shape, dtype, sharding=None):
    """The trace of a step, and the bytes of its pools."""
    spec = partial(jax.ShapeDtypeStruct, sharding=sharding)
    (layer,), hidden = config.layers, config.hidden_size
    a, inner = layer.attention, layer.mlp.width
    sizes = {
        "attention_norm": (hidden,), "beside_norm": (hidden,), "mlp_norm": (hidden,),
        "qkv": (a.width, (a.heads + 2 * a.kv_heads) * a.head_dim), "output": (a.heads * a.head_dim, hidden),
        "gate_up": (hidden, 2 * inner), "down": (inner, hidden),
    }  # fmt: skip
    params = {name: spec(size, dtype) for name, size in (("norm", (hidden,)), ("head", (hidden, 1000)))}
    params |= {"embed": spec((1000, hidden), dtype), "layers": [{name: spec(sizes[name], dtype) for name in sizes}]}
    pools = jax.eval_shape(lambda: make_pools(config, SLOTS // paging.page_size - 1, paging.page_size, dtype))
    layout = InputLayout(shape, 8192 // paging.page_size, hidden)
    pools = jax.tree.map(lambda x: spec(np.shape(x), x.dtype), pools)
    inputs = spec((layout.words(),), jnp.int32), spec((shape.sessions, shape.rows, hidden), jnp.float32)
    constants = program.Constants(config, paging, 4, 1000)
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))
    return program.compiled_step(constants, layout).trace(params, pools, *inputs), pool_bytes


def check_in_place(compiled, pool_bytes):
    """Every pool is returned in its own memory, and none is copied on the way."""
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes / 4
    assert not re.findall(rf"= \w+\[{SLOTS},[\d,]+\]\S* copy\(.*", compiled.as_text())
