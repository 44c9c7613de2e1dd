"""The start-up check of --deterministic: do a row's logits have the same bits whatever else is in the batch?

A few tokens are decoded one at a time, in a batch of their own; then all at once, some as a chunk and some as draft
nodes among wrong ones, next to other sessions of various lengths. If a bit of the logits differs, the start fails and
names the first module whose output differs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.messages import OpenSession
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.speculation.tree import EMPTY_SLICE, TreeSlice
from services.target.model.base import Model
from services.target.step.batch import Batch, SessionWork, build

_TOKENS = 6  # tokens of the session under test
_PROMPT = 3  # leading tokens computed as a chunk; the others are draft nodes
_RIGHT = (1, 3, 5)  # which of the nodes below hold those tokens
_PARENTS, _DEPTHS = (-1, -1, 0, 1, 3, 3), (1, 1, 2, 2, 3, 3)
_NEIGHBOURS = ((), (1,), (2, 1), (5,), (3, 9, 1), (30,), (17, 40, 1), (61, 3))  # rows of the others
_PAGE, _PAGES = 8, 32

Rows = dict[str, Tensor]  # outputs by module, in the order in which the modules finish


@torch.inference_mode()
def check(model: Model) -> None:
    """Raise ConfigError if the bits of a row depend on the other rows of the batch."""
    probe = _Probe(model)
    if probe.longest < _TOKENS:
        return
    expected = torch.cat(probe.alone())
    for others in _NEIGHBOURS:
        for first in (True, False):
            if not torch.equal(probe.together(others, first=first), expected):
                module = probe.divergent_module(others, first=first)
                raise ConfigError(
                    f"--deterministic: {module} of {model.architecture} computes a row differently when other rows are "
                    "in the batch; leave the flag out, or choose another model"
                )


class _Probe:
    """The session under test, and the sessions that share its batches."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.longest = min(model.context_length, 64)
        self._tokens = np.random.default_rng(0).integers(0, model.vocab_size, self.longest).astype(np.uint32)
        self._reset()

    def alone(self, seen: list[Rows] | None = None) -> list[Tensor]:
        """Logits after the prompt's last token and each later one, [1, V] each. seen: collects the modules' outputs."""
        self._reset()
        logits: list[Tensor] = []
        session = self._session(self._tokens[:_TOKENS])
        for token in range(_TOKENS):
            session.length = token + 1
            batch = build([SessionWork(Chunk(session, token, token + 1))], self._model.device)
            logits.append(self._run(batch, [0], seen))
        if seen is not None:
            del seen[: _PROMPT - 1]
        return logits[_PROMPT - 1 :]

    def together(self, others: Sequence[int], *, first: bool, seen: list[Rows] | None = None) -> Tensor:
        """The same logits, [tokens, V], from one step. first: whether the session precedes the others in the batch."""
        self._reset()
        watched = self._watched()
        works = [self._neighbour(min(rows, self.longest)) for rows in others]
        batch = build([watched, *works] if first else [*works, watched], self._model.device)
        span = batch.spans[0 if first else -1]
        root = span.first + span.committed - 1
        return self._run(batch, [root, *(root + 1 + node for node in _RIGHT)], seen)

    def divergent_module(self, others: Sequence[int], *, first: bool) -> str:
        """The first module whose outputs differ."""
        one_by_one: list[Rows] = []
        at_once: list[Rows] = []
        self.alone(one_by_one)
        self.together(others, first=first, seen=at_once)
        for name, rows in at_once[0].items():
            parts = [seen[name] for seen in one_by_one if name in seen]
            if len(parts) == len(one_by_one) and not torch.equal(torch.cat(parts), rows):
                return name
        return "a function outside of its modules"

    def _reset(self) -> None:
        model = self._model
        self._prefix = PrefixCache(PageAllocator(_PAGES, _PAGE), enabled=False)
        self._cache = model.new_cache(_PAGES, _PAGE)

    def _session(self, tokens: np.ndarray) -> Session:
        session = Session(OpenSession(0, tokens, len(tokens), SamplingParams(), StopConditions(1)), self._prefix)
        session.table.reserve(len(tokens) + len(_PARENTS))
        return session

    def _watched(self) -> SessionWork:
        nodes = self._tokens[: len(_PARENTS)] ^ 1  # wrong ones
        nodes = np.minimum(nodes, self._model.vocab_size - 1)
        nodes[list(_RIGHT)] = self._tokens[_PROMPT:_TOKENS]
        parents, depths = np.array(_PARENTS, np.int32), np.array(_DEPTHS, np.int32)
        draft = TreeSlice(nodes, parents, depths, np.zeros(len(nodes), np.float32))
        return SessionWork(Chunk(self._session(self._tokens[:_PROMPT]), 0, _PROMPT), draft)

    def _neighbour(self, rows: int) -> SessionWork:
        return SessionWork(Chunk(self._session(self._tokens[::-1][:rows].copy()), 0, rows), EMPTY_SLICE)

    def _run(self, batch: Batch, rows: list[int], seen: list[Rows] | None) -> Tensor:
        """Logits of some rows, [n, V]. seen: collects each module's outputs for these rows."""
        sampled = [batch.rows.sampled.tolist().index(row) for row in rows]
        with contextlib.ExitStack() as stack:
            if seen is not None:
                seen.append(stack.enter_context(_watching(self._model.runner, len(batch), rows, sampled)))
            return self._model.runner.forward(batch, self._cache).logits[sampled]


@contextlib.contextmanager
def _watching(runner: Any, count: int, rows: list[int], sampled: list[int]) -> Iterator[Rows]:
    """Collect the modules' outputs for some rows of a batch of `count`; nothing for a runner without modules."""
    seen: Rows = {}
    module: nn.Module | None = getattr(getattr(runner, "_runner", runner), "module", None)

    def note(name: str, output: Any) -> None:
        result = output[0] if isinstance(output, tuple) and output else output
        if not isinstance(result, Tensor) or name in seen:
            return
        flat = result[0] if result.dim() > 2 and len(result) == 1 else result
        if len(flat) == count:
            seen[name] = flat[rows].clone()
        elif len(flat) > max(sampled):
            seen[name] = flat[sampled].clone()

    handles = [
        child.register_forward_hook(lambda _, __, output, name=name: note(name, output))
        for name, child in (module.named_modules() if module is not None else ())
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
