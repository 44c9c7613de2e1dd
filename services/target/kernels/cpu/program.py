"""A decoder as a program of the compiled kernels: built operation by operation, then run once a step.

residual  the stream [T, H]            wide      queries, keys and values side by side, turned in place
attended  what attention returns       hidden    the gated values of the feed-forward layer
branch    what a branch adds, where it is normalised first
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.native import freed_with
from services.target.kernels.cpu import library
from services.target.kernels.cpu.attention import POOL_FORMATS, reads
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.sampling import HeadDraftTokens, SampledRows
from services.target.kernels.cpu.screen import Screen
from services.target.kernels.cpu.view import View
from services.target.kernels.cpu.weights import Format, PackedWeight
from services.target.kernels.kv_cache import KVCache
from services.target.step.batch import Batch
from services.target.step.programs import (
    CopyDrafting,
    FusedLoop,
    HeadDrafting,
    HeadInLoop,
    Interrupts,
    LoopIteration,
    MultiStepDecoding,
)

_NOTHING = (None, None, 0, None, 0, None, None, None)  # is captured
_PASSING_ROWS = 64  # most rows of logits for which there is room all the time


class Buffer(enum.IntEnum):
    """Rows of float32 that operations read and write, as in csrc/program.h."""

    RESIDUAL = 0
    WIDE = 1
    ATTENDED = 2
    HIDDEN = 3
    BRANCH = 4


class Activation(enum.IntEnum):
    """Of the gates in a gated layer, as in csrc/program.h."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. weight: [width] float32, what is multiplied with at last."""

    weight: Tensor
    epsilon: float


class Program:
    """Operations over a step's rows. Tensors that are handed over are kept, and may be overwritten where they lie."""

    def __init__(
        self, threads: int, computed: torch.dtype, pools: torch.dtype, width: int, beside: Program | None = None
    ) -> None:
        """computed: what keys and queries are multiplied in; pools: of the KV cache, see `attention.reads`.

        width: of the residual stream. beside: a program whose threads it shares, as long as they never run at once.
        """
        assert reads(computed, pools), "the kernels read these"
        self._functions = library.load()
        self._handle: int = self._functions.outrider_program_new(
            threads, computed == torch.bfloat16, POOL_FORMATS[pools], beside and beside._handle
        )
        freed_with(self, self._functions.outrider_program_free, self._handle)
        self._kept: list[object] = [beside]
        self._caches: dict[int, tuple[object, ...]] = {}
        self._width = width
        self._marks = 0
        self._captured = torch.bfloat16 if computed == torch.bfloat16 else torch.float32
        self._columns: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._vocab = 0
        self._ids: Tensor | None = None  # of the tokens that the logits are of; None if they are all, in order
        self._passing: dict[int, Tensor] = {}  # room for logits that are drawn from at once, by rows; all lie in one
        self._passing_address = 0
        for buffer in (Buffer.RESIDUAL, Buffer.BRANCH):
            self._functions.outrider_program_width(self._handle, buffer, width)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), "kernels walk through memory in order"
        self._kept.append(tensor)
        return tensor.data_ptr()

    def embed(self, table: Tensor, scale: float = 1.0) -> None:
        """residual = table[ids] * scale. table: [V, H], float32 or bfloat16."""
        assert table.dtype in (torch.float32, torch.bfloat16), "the kernels read these"
        address = self._address(table)
        self._functions.outrider_program_embed(
            self._handle, address, table.dtype == torch.bfloat16, table.shape[1], scale
        )

    def linear(
        self,
        weight: PackedWeight,
        source: Buffer,
        target: Buffer,
        *,
        norm: Norm | None = None,
        bias: Tensor | None = None,
        add: bool = False,
        activation: Activation = Activation.NONE,
        narrow: PackedWeight | None = None,
    ) -> None:
        """target (+)= norm(source) W^T + bias. With an activation, outputs come as 16 gates, their 16 values, ...

        narrow: a copy of the weight in fewer bits, which drafts read in its place
        """
        width = weight.outputs // 2 if activation else weight.outputs
        self._functions.outrider_program_width(self._handle, target, width)
        self._linear(weight, source, target, norm, bias, width, add=add, activation=activation)
        self._draft_with(narrow)

    def head(
        self,
        weight: PackedWeight,
        norm: Norm,
        softcap: float = 0.0,
        screen: Screen | None = None,
        narrow: PackedWeight | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """logits = softcapped norm(residual) W^T, of the sampled rows.

        ids: [outputs] int32, ascending, the tokens that the outputs stand for, where these are not all, in order

        screen: of the weight, in float32 or bfloat16, without a softcap. Where the largest logits are all that draws
        need, the others are the screen's. narrow: as of `linear`
        """
        self._vocab = weight.outputs
        self._linear(weight, Buffer.RESIDUAL, Buffer.RESIDUAL, norm, None, weight.outputs, head=True, softcap=softcap)
        if ids is not None:
            assert ids.dtype == torch.int32, "the kernels read these"
            self._kept.append(ids)
            self._ids = ids
        self._draft_with(narrow)
        if screen is not None:
            assert weight.format in (Format.FLOAT32, Format.BFLOAT16), "others are narrow themselves"
            assert not softcap, "bounds are of products"
            self._kept.append(screen)
            self._functions.outrider_program_screen(
                self._handle, screen.weight.handle, self._address(screen.errors), self._address(screen.sizes)
            )

    def _linear(
        self,
        weight: PackedWeight,
        source: Buffer,
        target: Buffer,
        norm: Norm | None,
        bias: Tensor | None,
        width: int,
        *,
        add: bool = False,
        activation: Activation = Activation.NONE,
        head: bool = False,
        softcap: float = 0.0,
    ) -> None:
        self._kept.append(weight)
        self._functions.outrider_program_linear(
            self._handle, weight.handle, self._address(bias), self._address(norm.weight if norm else None),
            norm.epsilon if norm else 0.0, source, target, width, add, activation, head, softcap,
        )  # fmt: skip

    def _draft_with(self, narrow: PackedWeight | None) -> None:
        if narrow is not None:
            self._kept.append(narrow)
            self._functions.outrider_program_narrow(self._handle, narrow.handle)

    def add_norm(self, norm: Norm) -> None:
        """residual += norm(branch)."""
        self._functions.outrider_program_add_norm(
            self._handle, self._address(norm.weight), norm.epsilon, Buffer.BRANCH, Buffer.RESIDUAL, self._width
        )

    def attend(
        self,
        layer: int,
        shape: AttentionShape,
        cosines: Tensor,
        sines: Tensor,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
    ) -> None:
        """Turn queries and keys in wide, store keys and values, and attend. cosines, sines: [positions, turned / 2]."""
        self._functions.outrider_program_width(self._handle, Buffer.ATTENDED, shape.heads * shape.value_dim)
        self._functions.outrider_program_rotate(
            self._handle, layer, ctypes.byref(shape), 2 * cosines.shape[1], self._address(cosines),
            self._address(sines), self._address(query_norm.weight if query_norm else None),
            self._address(key_norm.weight if key_norm else None), query_norm.epsilon if query_norm else 0.0,
        )  # fmt: skip
        self._functions.outrider_program_attend(self._handle, layer, ctypes.byref(shape))

    def mark(self, norm: Norm | None = None) -> None:
        """A place where the residual stream, normalised if there is a norm, can be captured. Counted from 0."""
        self._functions.outrider_program_capture(
            self._handle, self._marks, self._width,
            self._address(norm.weight if norm else None), norm.epsilon if norm else 0.0,
        )  # fmt: skip
        self._marks += 1

    def keep(self, column: int) -> None:
        """Copy the residual stream of every row to its slot in the cache's states, from a column on."""
        self._functions.outrider_program_keep(self._handle, column, self._width)

    def feed(self, width: int) -> None:
        """hidden = the rows' states in the cache, which are so wide."""
        self._functions.outrider_program_width(self._handle, Buffer.HIDDEN, width)
        self._functions.outrider_program_feed(self._handle, width)

    def join(self, table: Tensor, embedding: Norm, state: Norm, *, after_norm: bool) -> None:
        """hidden = [embedding(table[ids]), state(residual)]; the later steps of a burst that follows begin here.

        after_norm: the residual stream goes on normalised
        """
        assert embedding.epsilon == state.epsilon, "there is one for both"
        self._functions.outrider_program_width(self._handle, Buffer.HIDDEN, 2 * self._width)
        self._functions.outrider_program_join(
            self._handle, self._address(table), table.dtype == torch.bfloat16, self._width,
            self._address(embedding.weight), self._address(state.weight), state.epsilon, after_norm,
        )  # fmt: skip

    def run(self, batch: Batch, cache: KVCache) -> tuple[Tensor, Tensor | None, NDArray[np.int64] | None]:
        """Write keys and values; return logits [R, V], float32, and features [F, W], bfloat16 if computed in it.

        The features are fused if the capture says by what. The tokens that the batch's plan draws come last; logits
        from which they were drawn may be overwritten by the next run, and be a screen's where nothing else is sampled.
        Features and tokens of several steps lie one behind the other; the logits are the last step's.
        """
        assert not (batch.program and batch.capture and batch.capture.fusion), "only single steps fuse features"
        assert batch.program is None or isinstance(batch.program, MultiStepDecoding | CopyDrafting), "see other methods"
        steps, program = (1, None) if batch.program is None else (batch.program.steps, _several(batch.program))
        view = View(batch)
        keys, values, *states = self._pools(cache)
        capture, rows = batch.capture, len(batch.rows.sampled)
        logits, address = self._logits(rows, passing=batch.draws is not None)
        draws = None if batch.draws is None else SampledRows(address, self._vocab, batch.draws, steps=steps)
        pointer, tokens = (None, None) if draws is None else (draws.pointer, draws.tokens)
        if capture is None:
            done = self._functions.outrider_program_run(
                self._handle, view.pointer, keys, values, *states, address, pointer, *_NOTHING, program
            )
            return logits, None, tokens if done == steps else tokens[: done * rows]
        marks = (*capture.layers, self._marks - 1) if capture.final else capture.layers
        if marks not in self._columns:
            self._columns[marks] = self._columns_of(marks)
        taken = np.arange(len(batch)) if capture.rows is None else capture.rows
        features = torch.empty(steps * len(taken), len(marks) * self._width, dtype=self._captured)
        fusion, fused = (None, None, None), features
        if capture.fusion is not None:
            weight, bias = capture.fusion
            fused = torch.empty(len(taken), weight.outputs, dtype=self._captured)
            fusion = weight.handle, None if bias is None else bias.data_ptr(), fused.data_ptr()
        done = self._functions.outrider_program_run(
            self._handle, view.pointer, keys, values, *states, address, pointer, self._columns[marks].ctypes.data,
            taken.ctypes.data, len(taken), features.data_ptr(), features.shape[1], *fusion, program,
        )  # fmt: skip
        return (logits, fused, tokens) if done == steps else (logits, fused[: done * len(taken)], tokens[: done * rows])

    def follow(self, batch: Batch, cache: KVCache) -> HeadDraftTokens:
        """Draft with a head: its rows are committed tokens, `ahead` by one (see `build`), those of later steps a row a
        session. Keys and values are written."""
        drafting = batch.program
        assert isinstance(drafting, HeadDrafting), "a head follows the model"
        assert batch.draws is not None, "drafts are drawn"
        sessions = len(batch.rows.sampled)
        view, (keys, values, *states) = View(batch), self._pools(cache)
        _, address = self._logits(sessions, passing=True)
        draws = SampledRows(address, self._vocab, batch.draws, steps=drafting.steps, seconds=True, ids=self._ids)
        done = self._functions.outrider_program_run(
            self._handle, view.pointer, keys, values, *states, address, draws.pointer, *_NOTHING, _several(drafting)
        )
        return draws.guesses(done)

    def loop(
        self, head: Program | None, batch: Batch, cache: KVCache
    ) -> tuple[Tensor, NDArray[np.int64], Sequence[LoopIteration]]:
        """Draft, with a head or with the narrow copy or with both, and verify, iteration after iteration.

        The batch is the root of one session. Returns logits of no further use, the committed tokens, [n], and the
        outcome of each iteration.
        """
        loop, draws = batch.program, batch.draws
        assert isinstance(loop, FusedLoop), "the batch says what to loop over"
        assert draws is not None, "the loop samples"
        mover, chain, longest = cache.mover, *((loop.copy.chain, loop.copy.longest) if loop.copy else (0, 0))
        known, depth, alternatives = _of_head(loop.head)
        logits, address = self._logits(_PASSING_ROWS, passing=True)
        tokens, outcomes = np.empty(loop.room, np.int64), (library.LoopRound * loop.steps)()
        inner = (library.LoopRound * (loop.steps * chain))()
        interrupts = loop.interrupts
        call = library.FusedLoop(
            loop.steps, loop.seconds, loop.texts.addresses[0], loop.texts.lengths[0], loop.room, known,
            depth, alternatives, chain, longest, draws.sessions, interrupts.stops,
            interrupts.stop_counts[0], *interrupts.files.buffer_info(), loop.texts.match,
            batch.layout.pages.ctypes.data, batch.layout.page_size, ctypes.addressof(mover.pools),
            ctypes.addressof(mover.row_bytes), mover.count, self._vocab, tokens.ctypes.data,
            ctypes.addressof(outcomes), ctypes.addressof(inner),
        )  # fmt: skip
        if loop.head is not None:
            assert head is not None, "the loop drafts with it"
            head._describe_drafting(call, loop.head)
        done = self._functions.outrider_program_rounds(
            self._handle, head and head._handle, *self._pools(cache), address, ctypes.byref(call)
        )
        iterations = iter(inner)
        came = [_iteration(one, [_iteration(next(iterations)) for _ in range(one.within)]) for one in outcomes[:done]]
        return logits, tokens[: sum(one.committed for one in came)], came

    def _describe_drafting(self, call: library.FusedLoop, head: HeadInLoop) -> None:
        """Fill in how this program drafts as the head of a loop."""
        call.odds, call.second_odds = head.acceptance.buffer_info()[0], head.second_acceptance.buffer_info()[0]
        value = head.value
        call.next, call.token, call.row, call.step = value.next, value.token, value.row, value.step
        _, call.head_logits = self._logits(1, passing=True)
        call.head_vocab, call.head_ids = self._vocab, None if self._ids is None else self._ids.data_ptr()

    def _logits(self, rows: int, *, passing: bool) -> tuple[Tensor, int]:
        """Room for logits, and its address. passing: they are of use until the next run alone."""
        if not passing or rows > _PASSING_ROWS:
            logits = torch.empty(rows, self._vocab)
            return logits, logits.data_ptr()
        if rows not in self._passing:
            if not self._passing:
                self._passing[_PASSING_ROWS] = torch.empty(_PASSING_ROWS, self._vocab)
                self._passing_address = self._passing[_PASSING_ROWS].data_ptr()
            self._passing[rows] = self._passing[_PASSING_ROWS][:rows]
        return self._passing[rows], self._passing_address

    def _columns_of(self, marks: Sequence[int]) -> NDArray[np.int64]:
        """Where in a row of features each mark's state begins; -1 for those that are not among these."""
        columns = np.full(self._marks, -1)
        columns[list(marks)] = np.arange(len(marks)) * self._width
        return columns

    def _pools(self, cache: KVCache) -> tuple[object, ...]:
        """Addresses of the layers' pools, as C arrays; that of the pool of states, and its width."""
        if id(cache) not in self._caches:
            sides = [
                (ctypes.c_void_p * len(pools))(*(p.data_ptr() for p in pools)) for pools in (cache.keys, cache.values)
            ]
            states = (None, 0) if cache.states is None else (cache.states.data_ptr(), cache.states.shape[-1])
            self._caches = {id(cache): (cache, *sides, *states)}
        return self._caches[id(cache)][1:]


def _of_head(head: HeadInLoop | None) -> tuple[int, int, int]:
    """Known rows, depth and alternatives of a loop's head."""
    return (0, 0, 0) if head is None else (head.known, head.depth, head.alternatives)


def _iteration(found: library.LoopRound, inner: Sequence[LoopIteration] = ()) -> LoopIteration:
    alternatives = [place for place in range(found.chain) if found.beside >> place & 1]
    probabilities = [(one[0], one[1]) for one in found.odds[: found.chain]]
    return LoopIteration(
        found.written, found.guesses, found.chain, alternatives, found.right, found.accepted, found.committed,
        found.guessing, found.verifying, probabilities, found.known, inner,
    )  # fmt: skip


def _several(program: MultiStepDecoding | CopyDrafting | HeadDrafting) -> object:
    """Several steps in one call, as the kernels read them."""
    interrupts: Interrupts = program.interrupts
    (stop_counts, _), (files, count) = interrupts.stop_counts.buffer_info(), interrupts.files.buffer_info()
    narrow = isinstance(program, CopyDrafting)
    call = library.MultiStep(program.steps, interrupts.stops, stop_counts, files, count, narrow)
    if isinstance(program, HeadDrafting):
        call.follows = True
        if program.value is not None and program.acceptance is not None:
            value = program.value
            call.odds = program.acceptance.buffer_info()[0]
            call.next, call.row, call.step = value.next, value.row, value.step
    elif isinstance(program, MultiStepDecoding) and (texts := program.texts) is not None:
        call.texts, call.lengths = texts.addresses.buffer_info()[0], texts.lengths.buffer_info()[0]
        call.same = texts.match
    return ctypes.byref(call)
