"""Our attention inside `transformers` models, for every model that uses their attention interface.

A model is called with the packed rows of many sessions, [1, T]. A context variable, set around the forward pass, holds
the batch that assigns rows to sessions; the thread that owns the device owns the context, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.errors import ConfigError
from services.target.kernels.dispatch import Planner
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape
from services.target.model import latent
from services.target.step.batch import Batch

NAME = "outrider_paged"


@dataclass(frozen=True)
class Call:
    """One layer's attention call: q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, Dv], and its parameters."""

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class _Context(Protocol):
    def attend(self, call: Call) -> Tensor:
        """Returns [T, heads, Dv]."""
        ...


_context: ContextVar[_Context] = ContextVar("attention")


@contextlib.contextmanager
def _attending(context: _Context) -> Iterator[None]:
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


class _Paged:
    """Writes the rows of a batch into the cache and attends over pages."""

    def __init__(self, batch: Batch, cache: KVCache, planner: Planner) -> None:
        self._slots = batch.slots
        self._cache = cache
        self._attention = planner(batch)

    def attend(self, call: Call) -> Tensor:
        cache = self._cache
        cache.write(call.layer, self._slots, call.k, call.v)
        return self._attention(
            call.q, cache.keys[call.layer], cache.values[call.layer],
            scaling=call.scaling, window=call.window, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip


class Probe:
    """Records what each layer stores and how it attends, during a forward pass of one token."""

    def __init__(self) -> None:
        self.calls: dict[int, Call] = {}
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.dtype: torch.dtype | None = None

    def attend(self, call: Call) -> Tensor:
        if call.layer in self.shapes:
            raise ConfigError(f"layer {call.layer} of the model attends twice, which the paged cache cannot serve")
        self.calls[call.layer] = call
        shared = call.v.data_ptr() == call.k.data_ptr() != 0 and call.v.stride() == call.k.stride()  # 0: on meta
        self.shapes[call.layer] = LayerShape(call.k.shape[1], call.k.shape[2], call.v.shape[2], shared)
        self.windows[call.layer] = call.window
        self.dtype = call.k.dtype
        return call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], dim=1)  # one token sees only itself


def registered() -> str:
    """Register our attention with `transformers`. Returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _forward)
    return NAME


def paged(batch: Batch, cache: KVCache, planner: Planner) -> contextlib.AbstractContextManager[None]:
    """Forward passes inside attend over a batch's pages."""
    return _attending(_Paged(batch, cache, planner))


def probing(probe: Probe) -> contextlib.AbstractContextManager[None]:
    """The probe records the calls of a forward pass of one token inside."""
    return _attending(probe)


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention interface of `transformers`. query: [1, heads, T, D]. Returns [1, T, heads, Dv]."""
    if position_bias is not None or attention_mask is not None:
        raise ConfigError("the model's attention has a bias or mask of its own, which is not supported")
    folded = latent.of(module)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0] if folded is None else folded.queries(query[0])
    k, v = key[0], value[0]
    if torch.compiler.is_compiling():
        layer = module.outrider_layer  # see compiled.py
        attended = torch.ops.outrider.attend(q, k, v, layer, scaling, sliding_window, softcap, s_aux)
    else:
        attended = _attend(q, k, v, int(module.layer_idx), scaling, sliding_window, softcap, s_aux)  # type: ignore[arg-type]
    return (attended if folded is None else folded.values(attended))[None], None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q: [heads, T, D]; k, v: [kv_heads, T, D or Dv]. Returns [T, heads, Dv]."""
    call = Call(
        layer=layer,
        q=q.transpose(0, 1),
        k=k.transpose(0, 1),
        v=v.transpose(0, 1),
        scaling=scaling,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    return _context.get().attend(call)


@torch.library.custom_op("outrider::attend", mutates_args=())
def _opaque(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """`_attend` as one operation of compiled programs. layer: on the host."""
    return _attend(q, k, v, int(layer), scaling, window, softcap, sinks).contiguous()


@_opaque.register_fake
def _(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> Tensor:
    return q.new_empty(q.shape[1], q.shape[0], v.shape[2])
