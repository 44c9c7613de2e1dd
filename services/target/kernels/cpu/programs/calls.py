"""Arguments and results of a compiled program's calls, between Python's objects and the structures of csrc."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.target.kernels.cpu import library
from services.target.kernels.pools import CachePools
from services.target.step.programs import CopyDrafting, HeadDrafting, LoopIteration, MultiStepDecoding

TRANSIENT_ROWS = 64
"""Most rows of logits that `LogitsMemory` keeps allocated."""


class LogitsMemory:
    """Memory for the logits of runs. Logits that are read only until the next run share one allocation."""

    def __init__(self) -> None:
        self._views: dict[int, Tensor] = {}  # by number of rows, all in one allocation
        self._address = 0

    def of(self, rows: int, vocab: int, *, transient: bool) -> tuple[Tensor, int]:
        """A tensor [rows, vocab] float32 and its address. transient: its numbers are read only until the next run."""
        if not transient or rows > TRANSIENT_ROWS:
            logits = torch.empty(rows, vocab)
            return logits, logits.data_ptr()
        if rows not in self._views:
            if not self._views:
                self._views[TRANSIENT_ROWS] = torch.empty(TRANSIENT_ROWS, vocab)
                self._address = self._views[TRANSIENT_ROWS].data_ptr()
            self._views[rows] = self._views[TRANSIENT_ROWS][:rows]
        return self._views[rows], self._address


class PoolAddresses:
    """Addresses of a cache's pools, for the cache that was used last."""

    def __init__(self) -> None:
        self._caches: dict[int, tuple[object, ...]] = {}

    def of(self, cache: CachePools) -> tuple[object, ...]:
        """C arrays of the layers' keys and values; address of the pool of states, and its width."""
        if id(cache) not in self._caches:
            sides = [
                (ctypes.c_void_p * len(pools))(*(p.data_ptr() for p in pools)) for pools in (cache.keys, cache.values)
            ]
            states = (None, 0) if cache.states is None else (cache.states.data_ptr(), cache.states.shape[-1])
            self._caches = {id(cache): (cache, *sides, *states)}
        return self._caches[id(cache)][1:]


def multi_step_argument(program: MultiStepDecoding | CopyDrafting | HeadDrafting) -> object:
    """Several steps in one call as the kernels take them, by reference."""
    interrupts = program.interrupts
    (stop_counts, _), (files, count) = interrupts.stop_counts.buffer_info(), interrupts.files.buffer_info()
    narrow = isinstance(program, CopyDrafting)
    argument = library.MultiStep(program.steps, interrupts.stops, stop_counts, files, count, narrow)
    if isinstance(program, HeadDrafting):
        argument.draft_chain = True
        if program.value is not None and program.acceptance is not None:
            value = program.value
            argument.acceptance_rates = program.acceptance.buffer_info()[0]
            argument.token_gain, argument.row_cost, argument.step_cost = value.next, value.row, value.step
    elif isinstance(program, MultiStepDecoding) and (texts := program.texts) is not None:
        argument.texts, argument.lengths = texts.addresses.buffer_info()[0], texts.lengths.buffer_info()[0]
        argument.repeat_length = texts.match
    return ctypes.byref(argument)


def loop_results(results: ctypes.Array[library.LoopIteration], count: int) -> Sequence[LoopIteration]:
    """The first `count` iterations of a fused loop."""
    return [
        LoopIteration(
            one.written, one.draft_tokens, one.verified, one.accepted, one.committed, one.drafting, one.verifying,
            one.probabilities[: one.verified], one.head_tokens,
        )
        for one in results[:count]
    ]  # fmt: skip
