"""The compiled kernels, bound with ctypes. Structures mirror those of `csrc/`, field by field."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p

from outrider import native
from services.target.kernels.cpu import build

Unavailable = native.Unavailable


class BlockRow(ctypes.Structure):
    """Arrays of a weight in a block format; see outrider/native/include/weights/block_rows.h."""

    _fields_ = (
        ("values", c_void_p),
        ("scales", c_void_p),
        ("minima", c_void_p),
        ("scale_units", c_void_p),
        ("minimum_units", c_void_p),
    )


class AttentionShape(ctypes.Structure):
    """Attention of a layer; window, softcap and value_stride: 0 for none; see csrc/attention/attention_plan.h."""

    _fields_ = (
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("scaling", c_float),
        ("window", c_int64),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("value_stride", c_int64),
    )


class Product(ctypes.Structure):
    """Products of groups of rows; see csrc/matrices/invariant_product.h."""

    _fields_ = (
        ("first", c_void_p),
        ("which", c_void_p),
        ("groups", c_int64),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("x", c_void_p),
        ("weight", c_void_p),
        ("matrix_stride", c_int64),
        ("weight_stride", c_int64),
        ("by_inputs", c_int32),
        ("bfloat16", c_int32),
        ("bias", c_void_p),
        ("y", c_void_p),
    )


class SampleCall(ctypes.Structure):
    """Rows to sample a token after; see csrc/sampling/sampling.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("rows", c_int64),
        ("vocab", c_int64),
        ("sessions", c_char_p),
        ("counts", c_void_p),
        ("positions", c_void_p),
        ("masks", c_void_p),
        ("words", c_void_p),
        ("tokens", c_void_p),
        ("ids", c_void_p),
        ("probabilities", c_void_p),
    )


class MultiStep(ctypes.Structure):
    """Multi-step decoding; see csrc/programs/program.h."""

    _fields_ = (
        ("steps", c_int64),
        ("stops", c_char_p),
        ("stop_counts", c_void_p),
        ("interrupt_fds", c_void_p),
        ("interrupt_fd_count", c_int64),
        ("narrow", c_bool),
        ("texts", c_void_p),
        ("lengths", c_void_p),
        ("repeat_length", c_int64),
        ("draft_chain", c_bool),
        ("acceptance_rates", c_void_p),
        ("token_gain", c_double),
        ("row_cost", c_double),
        ("step_cost", c_double),
    )


class LoopIteration(ctypes.Structure):
    """The result of an iteration of the fused speculation loop; see csrc/programs/fused_loop.h."""

    _fields_ = (
        ("written", c_int64),
        ("draft_tokens", c_int64),
        ("verified", c_int64),
        ("accepted", c_int64),
        ("committed", c_int64),
        ("head_tokens", c_int64),
        ("drafting", c_double),
        ("verifying", c_double),
        ("probabilities", c_float * 16),
    )


class FusedLoop(ctypes.Structure):
    """The fused speculation loop; see csrc/programs/fused_loop.h."""

    _fields_ = (
        ("max_iterations", c_int64),
        ("seconds", c_double),
        ("text", c_void_p),
        ("length", c_int64),
        ("room", c_int64),
        ("depth", c_int64),
        ("sampling", c_char_p),
        ("stops", c_char_p),
        ("stop_count", c_int64),
        ("interrupt_fds", c_void_p),
        ("interrupt_fd_count", c_int64),
        ("repeat_length", c_int64),
        ("pages", c_void_p),
        ("page_size", c_int64),
        ("vocab", c_int64),
        ("tokens", c_void_p),
        ("results", c_void_p),
        ("head_tokens", c_int64),
        ("acceptance_rates", c_void_p),
        ("token_gain", c_double),
        ("token_value", c_double),
        ("row_cost", c_double),
        ("step_cost", c_double),
        ("head_logits", c_void_p),
        ("head_vocab", c_int64),
        ("head_ids", c_void_p),
    )


class BatchView(ctypes.Structure):
    """The rows of a step; see csrc/attention/batch.h."""

    _fields_ = (
        ("rows", c_int64),
        ("spans", c_int64),
        ("sampled_rows", c_int64),
        ("page_size", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("sampled", c_void_p),
        ("first", c_void_p),
        ("start", c_void_p),
        ("committed", c_void_p),
        ("parents", c_void_p),
        ("pages", c_void_p),
        ("table", c_void_p),
    )


Clock = ctypes.CFUNCTYPE(c_double)
_SHAPE, _BATCH = POINTER(AttentionShape), POINTER(BatchView)
_SIGNATURES: native.Signatures = {
    "weight_new": (c_void_p, (c_int32, c_int64, c_int64, c_int64)),
    "weight_free": (None, (c_void_p,)),
    "weight_allocate": (None, (c_void_p,)),
    "weight_place": (None, (c_void_p, c_void_p, c_void_p)),
    "weight_bytes": (c_int64, (c_void_p,)),
    "checksum": (c_uint64, (c_void_p, c_int64)),
    "weight_memory": (None, (c_void_p, c_void_p)),
    "weight_pack": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "weight_pack_quantized": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)),
    "weight_quantize": (
        None, (c_void_p, c_void_p, c_int32, c_void_p, c_int64, c_void_p, c_int32, c_int32),
    ),
    "weight_pack_gguf": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int32)),
    "weight_pack_arrays": (None, (c_void_p, POINTER(BlockRow), c_void_p, c_int64, c_int32)),
    "weight_dequantize": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int32)),
    "pool_new": (c_void_p, (c_int32,)),
    "pool_free": (None, (c_void_p,)),
    "use_matrix_unit": (c_int32, (c_int32,)),
    "has_matrix_unit": (c_int32, ()),
    "linear": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32)),
    "product": (None, (c_void_p, POINTER(Product))),
    "apply": (None, (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int32)),
    "attention": (None, (c_void_p, _BATCH, _SHAPE, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32)),
    "move_rows": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "sample": (None, (c_void_p, POINTER(SampleCall))),
    "program_new": (c_void_p, (c_int32, c_int32, c_int32, c_void_p)),
    "program_free": (None, (c_void_p,)),
    "program_width": (None, (c_void_p, c_int32, c_int64)),
    "program_embed": (None, (c_void_p, c_void_p, c_int32, c_int64, c_float)),
    "program_linear": (
        None,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_float, *(c_int32,) * 2, *(c_int64,) * 2, *(c_int32,) * 3, c_float),
    ),
    "program_narrow": (None, (c_void_p, c_void_p)),
    "program_prune_head": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "program_add_norm": (None, (c_void_p, c_void_p, c_float, c_int32, c_int32, c_int64)),
    "program_rotate": (
        None, (c_void_p, c_int32, _SHAPE, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_float),
    ),
    "program_attend": (None, (c_void_p, c_int32, _SHAPE)),
    "program_capture": (None, (c_void_p, c_int32, c_int64, c_void_p, c_float)),
    "program_store_state": (None, (c_void_p, c_int64, c_int64)),
    "program_load_state": (None, (c_void_p, c_int64)),
    "program_join_embedding": (None, (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_float, c_int32)),
    "program_run": (
        c_int64,
        (
            c_void_p, _BATCH, *(c_void_p,) * 3, c_int64, c_void_p, POINTER(SampleCall), *(c_void_p,) * 2, c_int64,
            c_void_p, c_int64, *(c_void_p,) * 3, POINTER(MultiStep),
        ),
    ),
    "program_fused_loop": (c_int64, (*(c_void_p,) * 5, c_int64, c_void_p, POINTER(FusedLoop))),
    "read_bandwidth": (c_double, (c_void_p, c_char_p, c_int64, Clock)),
}  # fmt: skip


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library; the first call compiles it. Raises Unavailable."""
    return build.KERNELS.loaded("outrider_", _SIGNATURES)


def available() -> bool:
    """True if the library compiles and loads on this machine."""
    try:
        load()
    except Unavailable:
        return False
    return True
