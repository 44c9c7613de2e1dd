"""What attention kernels are told: what the rows of a step see, and how the programs are to compute it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax

Backend = Literal["plain", "cpu", "pallas_gpu", "pallas_tpu"]


class Context(NamedTuple):
    """What the rows of a step see. S sessions, Q rows each.

    pages:         [S, P] int32, the trunk's pages in order; NULL_PAGE behind the last
    visible:       [S, Q] int32, number of trunk tokens that each row sees
    scratch_slots: [S, C] int32, slots of the session's scratch
    scratch_mask:  [S, Q, C] bool, which of them each row sees
    """

    pages: jax.Array
    visible: jax.Array
    scratch_slots: jax.Array
    scratch_mask: jax.Array


class Paging(NamedTuple):
    """How keys and values are read; a static argument of the compiled programs, so that no step decides anything.

    page_size: tokens of a page; backend: the kernel that reads them; interpret: run a Pallas kernel on the CPU, slowly
    """

    page_size: int
    backend: Backend = "plain"
    interpret: bool = False
