"""The compiled kernels, bound with ctypes."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p

from outrider import native
from services.target.kernels.cpu import build

Unavailable = native.Unavailable


class AttentionShape(ctypes.Structure):
    """How a layer attends; window, softcap and value_stride are 0 where there is none; see csrc/attention_plan.h."""

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
    """Products of groups of rows; see csrc/product.h."""

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


class DrawCall(ctypes.Structure):
    """Rows after each of which a token is drawn; see csrc/draw.h."""

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
        ("seconds", c_void_p),
        ("ids", c_void_p),
        ("odds", c_void_p),
    )


class MultiStep(ctypes.Structure):
    """Plain steps, one behind the other; see csrc/program.h."""

    _fields_ = (
        ("steps", c_int64),
        ("stops", c_char_p),
        ("stop_counts", c_void_p),
        ("files", c_void_p),
        ("file_count", c_int64),
        ("narrow", c_bool),
        ("texts", c_void_p),
        ("lengths", c_void_p),
        ("same", c_int64),
        ("follows", c_bool),
        ("odds", c_void_p),
        ("next", c_double),
        ("row", c_double),
        ("step", c_double),
    )


class LoopRound(ctypes.Structure):
    """What came of a round; see csrc/rounds.h."""

    _fields_ = (
        ("written", c_int64),
        ("guesses", c_int64),
        ("chain", c_int64),
        ("beside", c_int64),
        ("right", c_int64),
        ("accepted", c_int64),
        ("committed", c_int64),
        ("within", c_int64),
        ("known", c_int64),
        ("guessing", c_double),
        ("verifying", c_double),
        ("odds", c_float * 2 * 16),
    )


class FusedLoop(ctypes.Structure):
    """Guesses and their verification, round after round; see csrc/rounds.h."""

    _fields_ = (
        ("most", c_int64),
        ("seconds", c_double),
        ("text", c_void_p),
        ("length", c_int64),
        ("room", c_int64),
        ("known", c_int64),
        ("depth", c_int64),
        ("others", c_int64),
        ("chain", c_int64),
        ("longest", c_int64),
        ("sampling", c_char_p),
        ("stops", c_char_p),
        ("stop_count", c_int64),
        ("files", c_void_p),
        ("file_count", c_int64),
        ("same", c_int64),
        ("pages", c_void_p),
        ("page_size", c_int64),
        ("pools", c_void_p),
        ("row_bytes", c_void_p),
        ("pool_count", c_int64),
        ("vocab", c_int64),
        ("tokens", c_void_p),
        ("told", c_void_p),
        ("within", c_void_p),
        ("odds", c_void_p),
        ("second_odds", c_void_p),
        ("next", c_double),
        ("token", c_double),
        ("row", c_double),
        ("step", c_double),
        ("head_logits", c_void_p),
        ("head_vocab", c_int64),
        ("head_ids", c_void_p),
    )


class BatchView(ctypes.Structure):
    """A step's rows; see csrc/batch.h."""

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
    "weight_new": (c_void_p, (c_int32, c_int64, c_int64)),
    "weight_free": (None, (c_void_p,)),
    "weight_bytes": (c_int64, (c_void_p,)),
    "weight_pack": (None, (c_void_p, c_void_p, c_void_p, c_int64)),
    "weight_pack_quantized": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64)),
    "pool_new": (c_void_p, (c_int32,)),
    "pool_free": (None, (c_void_p,)),
    "use_matrix_unit": (c_int32, (c_int32,)),
    "has_matrix_unit": (c_int32, ()),
    "linear": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int32)),
    "product": (None, (c_void_p, POINTER(Product))),
    "apply": (None, (c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int32)),
    "attention": (None, (c_void_p, _BATCH, _SHAPE, c_void_p, c_void_p, c_void_p, c_void_p, c_int32, c_int32)),
    "move_rows": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64)),
    "draw": (None, (c_void_p, POINTER(DrawCall))),
    "program_new": (c_void_p, (c_int32, c_int32, c_int32, c_void_p)),
    "program_free": (None, (c_void_p,)),
    "program_width": (None, (c_void_p, c_int32, c_int64)),
    "program_embed": (None, (c_void_p, c_void_p, c_int32, c_int64, c_float)),
    "program_linear": (
        None,
        (c_void_p, c_void_p, c_void_p, c_void_p, c_float, *(c_int32,) * 2, c_int64, *(c_int32,) * 3, c_float),
    ),
    "program_narrow": (None, (c_void_p, c_void_p)),
    "program_screen": (None, (c_void_p, c_void_p, c_void_p, c_void_p)),
    "program_add_norm": (None, (c_void_p, c_void_p, c_float, c_int32, c_int32, c_int64)),
    "program_rotate": (
        None, (c_void_p, c_int32, _SHAPE, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_float),
    ),
    "program_attend": (None, (c_void_p, c_int32, _SHAPE)),
    "program_capture": (None, (c_void_p, c_int32, c_int64, c_void_p, c_float)),
    "program_keep": (None, (c_void_p, c_int64, c_int64)),
    "program_feed": (None, (c_void_p, c_int64)),
    "program_join": (None, (c_void_p, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_float, c_int32)),
    "program_run": (
        c_int64,
        (
            c_void_p, _BATCH, *(c_void_p,) * 3, c_int64, c_void_p, POINTER(DrawCall), *(c_void_p,) * 2, c_int64,
            c_void_p, c_int64, *(c_void_p,) * 3, POINTER(MultiStep),
        ),
    ),
    "program_rounds": (c_int64, (*(c_void_p,) * 5, c_int64, c_void_p, POINTER(FusedLoop))),
    "read_bandwidth": (c_double, (c_void_p, c_char_p, c_int64, Clock)),
}  # fmt: skip


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled at the first call. Raises Unavailable."""
    return build.KERNELS.loaded("outrider_", _SIGNATURES)


def available() -> bool:
    """True if the library can be had on this machine."""
    try:
        load()
    except Unavailable:
        return False
    return True
