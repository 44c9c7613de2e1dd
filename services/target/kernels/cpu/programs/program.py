"""A decoder as a program of the compiled kernels: built operation by operation, then run once a step.

residual  the residual stream [T, H]   wide      queries, keys and values side by side, rotated in place
attended  the output of attention      hidden    the gated values of the feed-forward layer
branch    the output of a branch that is normalised before it is added

A new operation goes into csrc/programs/program.h and program.cpp, with a method here that appends it.
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
from services.target.kernels.cpu.attention.batch_view import BatchPointers
from services.target.kernels.cpu.attention.paged import POOL_FORMATS, reads
from services.target.kernels.cpu.library import AttentionShape
from services.target.kernels.cpu.matrices.weights import Format, PackedWeight
from services.target.kernels.cpu.programs.calls import (
    TRANSIENT_ROWS,
    LogitsMemory,
    PoolAddresses,
    loop_results,
    multi_step_argument,
)
from services.target.kernels.cpu.programs.pruned_head import PrunedHead
from services.target.kernels.cpu.sampling import HeadDraftTokens, SampledRows
from services.target.kernels.pools import CachePools
from services.target.step.batch import Batch
from services.target.step.programs import (
    CopyDrafting,
    FusedLoop,
    HeadDrafting,
    HeadInLoop,
    LoopIteration,
    MultiStepDecoding,
)

_NO_CAPTURE = (None, None, 0, None, 0, None, None, None)


class Buffer(enum.IntEnum):
    """Buffers of float32 rows that operations read and write, as in csrc/programs/program.h."""

    RESIDUAL = 0
    WIDE = 1
    ATTENDED = 2
    HIDDEN = 3
    BRANCH = 4


class Activation(enum.IntEnum):
    """The activation of the gates in a gated layer, as in csrc/programs/program.h."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm. weight: [width] float32, any shift included."""

    weight: Tensor
    epsilon: float


class Program:
    """Operations over a step's rows.

    kept: the tensors and weights that it reads, which may be overwritten in place
    """

    def __init__(
        self, threads: int, computed: torch.dtype, pools: torch.dtype, width: int, beside: Program | None = None
    ) -> None:
        """computed: format in which keys and queries are multiplied; pools: of the KV cache, see `attention.reads`.

        width: of the residual stream. beside: a program whose threads it shares; the two must never run at once.
        """
        assert reads(computed, pools), "the kernels read these"
        self._functions = library.load()
        self._handle: int = self._functions.outrider_program_new(
            threads, computed == torch.bfloat16, POOL_FORMATS[pools], beside and beside._handle
        )
        freed_with(self, self._functions.outrider_program_free, self._handle)
        self.kept: list[object] = [beside]
        self._addresses = PoolAddresses()
        self._width = width
        self._marks = 0
        self._captured = torch.bfloat16 if computed == torch.bfloat16 else torch.float32
        self._columns: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._vocab = 0
        self._ids: Tensor | None = None  # [vocab] token ids of the logits; None: the whole vocabulary in order
        self._memory = LogitsMemory()
        for buffer in (Buffer.RESIDUAL, Buffer.BRANCH):
            self._functions.outrider_program_width(self._handle, buffer, width)

    def _address(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        assert tensor.is_contiguous(), "kernels walk through memory in order"
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _table(self, table: Tensor | PackedWeight) -> tuple[int | None, int]:
        """The address of an embedding, and its kind, as in csrc/api.cpp."""
        if isinstance(table, PackedWeight):
            self.kept.append(table)
            return table.handle, 2
        assert table.dtype in (torch.float32, torch.bfloat16), "the kernels read these"
        return self._address(table), int(table.dtype == torch.bfloat16)

    def embed(self, table: Tensor | PackedWeight, scale: float = 1.0) -> None:
        """residual = table[ids] * scale. table: [V, H], float32, bfloat16 or packed."""
        self._functions.outrider_program_embed(self._handle, *self._table(table), self._width, scale)

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
        column: int = 0,
    ) -> None:
        """target (+)= norm(source) W^T + bias. With an activation, outputs alternate: 16 gates, their 16 values.

        narrow: a copy of the weight in fewer bits, which drafting steps read instead
        column: first column of the outputs in the target; not with an activation
        """
        assert not (column and activation), "gated outputs begin their buffer"
        width = weight.outputs // 2 if activation else weight.outputs
        self._functions.outrider_program_width(self._handle, target, column + width)
        self._linear(weight, source, target, norm, bias, width, column=column, add=add, activation=activation)
        self._set_narrow(narrow)

    def head(
        self,
        weight: PackedWeight,
        norm: Norm,
        softcap: float = 0.0,
        pruned: PrunedHead | None = None,
        narrow: PackedWeight | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """logits = softcapped norm(residual) W^T, of the sampled rows.

        ids: [outputs] int32, ascending token ids of the outputs; None: the whole vocabulary in order. pruned: a narrow
        copy of the weight, which must be float32 or bfloat16 and without softcap; runs whose sampling needs only the
        largest logits compute the others with the copy. narrow: as in `linear`.
        """
        self._vocab = weight.outputs
        self._linear(weight, Buffer.RESIDUAL, Buffer.RESIDUAL, norm, None, weight.outputs, head=True, softcap=softcap)
        if ids is not None:
            assert ids.dtype == torch.int32, "the kernels read these"
            self.kept.append(ids)
            self._ids = ids
        self._set_narrow(narrow)
        if pruned is not None:
            assert weight.format in (Format.FLOAT32, Format.BFLOAT16), "other formats are narrow themselves"
            assert not softcap, "the bounds are those of products"
            self.kept.append(pruned)
            self._functions.outrider_program_prune_head(
                self._handle,
                pruned.weight.handle,
                self._address(pruned.error_norms),
                self._address(pruned.narrow_norms),
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
        column: int = 0,
        add: bool = False,
        activation: Activation = Activation.NONE,
        head: bool = False,
        softcap: float = 0.0,
    ) -> None:
        self.kept.append(weight)
        self._functions.outrider_program_linear(
            self._handle, weight.handle, self._address(bias), self._address(norm.weight if norm else None),
            norm.epsilon if norm else 0.0, source, target, width, column, add, activation, head, softcap,
        )  # fmt: skip

    def _set_narrow(self, narrow: PackedWeight | None) -> None:
        if narrow is not None:
            self.kept.append(narrow)
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
        """Rotate queries and keys in wide, store keys and values, attend. cosines, sines: [positions, rotary / 2]."""
        self._functions.outrider_program_width(self._handle, Buffer.ATTENDED, shape.heads * shape.value_dim)
        self._functions.outrider_program_rotate(
            self._handle, layer, ctypes.byref(shape), 2 * cosines.shape[1], self._address(cosines),
            self._address(sines), self._address(query_norm.weight if query_norm else None),
            self._address(key_norm.weight if key_norm else None), query_norm.epsilon if query_norm else 0.0,
        )  # fmt: skip
        self._functions.outrider_program_attend(self._handle, layer, ctypes.byref(shape))

    def mark(self, norm: Norm | None = None) -> None:
        """Mark a point where the residual stream, normalised if there is a norm, can be captured. Counted from 0."""
        self._functions.outrider_program_capture(
            self._handle, self._marks, self._width,
            self._address(norm.weight if norm else None), norm.epsilon if norm else 0.0,
        )  # fmt: skip
        self._marks += 1

    def store_state(self, column: int) -> None:
        """Copy the residual stream of every row to its slot in the cache's states, from a column on."""
        self._functions.outrider_program_store_state(self._handle, column, self._width)

    def load_state(self, width: int) -> None:
        """hidden = the rows' states in the cache. width: of a state."""
        self._functions.outrider_program_width(self._handle, Buffer.HIDDEN, width)
        self._functions.outrider_program_load_state(self._handle, width)

    def join_embedding(self, table: Tensor | PackedWeight, embedding: Norm, state: Norm, *, after_norm: bool) -> None:
        """hidden = [embedding(table[ids]), state(residual)]; later steps of `draft_chain` start here.

        after_norm: the normalised state replaces the residual stream
        """
        assert embedding.epsilon == state.epsilon, "one epsilon serves both norms"
        self._functions.outrider_program_width(self._handle, Buffer.HIDDEN, 2 * self._width)
        self._functions.outrider_program_join_embedding(
            self._handle, *self._table(table), self._width,
            self._address(embedding.weight), self._address(state.weight), state.epsilon, after_norm,
        )  # fmt: skip

    def run(self, batch: Batch, cache: CachePools) -> tuple[Tensor, Tensor | None, NDArray[np.int64] | None]:
        """Write keys and values. Returns logits [R, V] float32, features [F, W], and the tokens that the batch samples.

        Features are fused if the capture has a fusion, and bfloat16 if the computation is. Logits that the run samples
        from may be overwritten by the next run, and approximate if nothing else reads them. With multi-step decoding,
        features and tokens of the steps follow one another, and the logits are those of the last step.
        """
        program = batch.program
        assert not (program and batch.capture and batch.capture.fusion), "only single steps fuse features"
        assert program is None or isinstance(program, MultiStepDecoding | CopyDrafting), "others have their own methods"
        steps, several = (1, None) if program is None else (program.steps, multi_step_argument(program))
        view = BatchPointers(batch)
        keys, values, *states = self._addresses.of(cache)
        capture, rows = batch.capture, len(batch.rows.sampled)
        logits, address = self._memory.of(rows, self._vocab, transient=batch.sampling is not None)
        samples = None if batch.sampling is None else SampledRows(address, self._vocab, batch.sampling, steps=steps)
        pointer, tokens = (None, None) if samples is None else (samples.pointer, samples.tokens)
        if capture is None:
            done = self._functions.outrider_program_run(
                self._handle, view.pointer, keys, values, *states, address, pointer, *_NO_CAPTURE, several
            )
            return logits, None, _leading(tokens, done * rows) if done != steps else tokens
        marks = (*capture.layers, self._marks - 1) if capture.final else capture.layers
        if marks not in self._columns:
            self._columns[marks] = self._columns_of(marks)
        taken = np.arange(len(batch)) if capture.rows is None else capture.rows
        features = torch.empty(steps * len(taken), len(marks) * self._width, dtype=self._captured)
        fusion: tuple[int | None, int | None, int | None] = (None, None, None)
        fused = features
        if capture.fusion is not None:
            weight, bias = capture.fusion
            assert isinstance(weight, PackedWeight), "the kernels multiply packed weights"
            fused = torch.empty(len(taken), weight.outputs, dtype=self._captured)
            fusion = weight.handle, None if bias is None else bias.data_ptr(), fused.data_ptr()
        done = self._functions.outrider_program_run(
            self._handle, view.pointer, keys, values, *states, address, pointer, self._columns[marks].ctypes.data,
            taken.ctypes.data, len(taken), features.data_ptr(), features.shape[1], *fusion, several,
        )  # fmt: skip
        if done == steps:
            return logits, fused, tokens
        return logits, fused[: done * len(taken)], _leading(tokens, done * rows)

    def draft_chain(self, batch: Batch, cache: CachePools) -> HeadDraftTokens:
        """Draft a chain a session with an EAGLE head, and write its keys and values.

        The batch's rows are committed tokens, `ahead` by one (see `build`); later steps have one row a session.
        """
        drafting = batch.program
        assert isinstance(drafting, HeadDrafting), "the batch has the head's program"
        assert batch.sampling is not None, "draft tokens are sampled"
        sessions = len(batch.rows.sampled)
        view, (keys, values, *states) = BatchPointers(batch), self._addresses.of(cache)
        _, address = self._memory.of(sessions, self._vocab, transient=True)
        samples = SampledRows(
            address, self._vocab, batch.sampling, steps=drafting.steps, probabilities=True, ids=self._ids
        )
        done = self._functions.outrider_program_run(
            self._handle, view.pointer, keys, values, *states, address, samples.pointer, *_NO_CAPTURE,
            multi_step_argument(drafting),
        )  # fmt: skip
        return samples.draft_tokens(done)

    def fused_loop(
        self, head: Program | None, batch: Batch, cache: CachePools
    ) -> tuple[Tensor, NDArray[np.int64], Sequence[LoopIteration]]:
        """Draft with an EAGLE head, or with the narrow copy if there is none, and verify, several times in one call.

        The batch is the root of one session. Returns logits, which must not be read, the committed tokens, [n] int64,
        and the result of each iteration.
        """
        loop, sampling = batch.program, batch.sampling
        assert isinstance(loop, FusedLoop), "the batch has the loop's program"
        assert sampling is not None, "tokens are sampled"
        assert (head is None) == (loop.head is None), "a model with a head drafts with it"
        interrupts, texts = loop.interrupts, loop.texts
        logits, address = self._memory.of(TRANSIENT_ROWS, self._vocab, transient=True)
        tokens, results = np.empty(loop.room, np.int64), (library.LoopIteration * loop.steps)()
        call = library.FusedLoop(
            loop.steps, loop.seconds, texts.addresses[0], texts.lengths[0], loop.room, loop.depth, sampling.sessions,
            interrupts.stops, interrupts.stop_counts[0], *interrupts.files.buffer_info(), texts.match,
            batch.layout.pages.ctypes.data, batch.layout.page_size, self._vocab, tokens.ctypes.data,
            ctypes.addressof(results),
        )  # fmt: skip
        if head is not None and loop.head is not None:
            head._set_head(call, loop.head)
        done = self._functions.outrider_program_fused_loop(
            self._handle, head and head._handle, *self._addresses.of(cache), address, ctypes.byref(call)
        )
        iterations = loop_results(results, done)
        return logits, tokens[: sum(one.committed for one in iterations)], iterations

    def _set_head(self, call: library.FusedLoop, head: HeadInLoop) -> None:
        """Fill in the fields of a fused loop that describe this program as its head."""
        call.head_tokens, call.acceptance_rates = head.known, head.acceptance.buffer_info()[0]
        value = head.value
        call.token_gain, call.token_value = value.next, value.token
        call.row_cost, call.step_cost = value.row, value.step
        _, call.head_logits = self._memory.of(1, self._vocab, transient=True)
        call.head_vocab, call.head_ids = self._vocab, None if self._ids is None else self._ids.data_ptr()

    def _columns_of(self, marks: Sequence[int]) -> NDArray[np.int64]:
        """[marks] int64: first column of each mark's state in a row of features; -1 for marks not captured."""
        columns = np.full(self._marks, -1)
        columns[list(marks)] = np.arange(len(marks)) * self._width
        return columns


def _leading(tokens: NDArray[np.int64] | None, count: int) -> NDArray[np.int64]:
    """The first `count` tokens of a run that ended early."""
    assert tokens is not None, "only runs that sample end early"
    return tokens[:count]
