"""The inputs of attention kernels: the visibility of a step's rows, and static settings."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

Backend = Literal["plain", "cpu", "pallas_gpu", "pallas_tpu"]


class Context(NamedTuple):
    """The keys that the rows of a step attend to. S sessions, Q rows each.

    pages:         [S, P] int32, the pages of the prefix KV in order; NULL_PAGE behind the last
    visible:       [S, Q] int32, number of tokens of the prefix KV that each row attends to
    scratch_slots: [S, C] int32, slots of the session's scratch
    scratch_mask:  [S, Q, C] bool, scratch slots that each row attends to
    """

    pages: jax.Array
    visible: jax.Array
    scratch_slots: jax.Array
    scratch_mask: jax.Array


class Paging(NamedTuple):
    """How keys and values are read; a static argument of the compiled programs.

    page_size: tokens of a page; backend: the attention kernel; interpret: run a Pallas kernel on the CPU, slowly
    """

    page_size: int
    backend: Backend = "plain"
    interpret: bool = False
