"""The attention kernel of the draft service alone, on an accelerator of JAX, against its floor.

floor   the time to read the keys and values of all contexts, at the bandwidth measured in the same run
kernel  the tile of the GPU kernel: lanes x keys, warps, stages, and splits of a context. "picked" is the tile that the
        service selects; "plain" is the plain twin in XLA operations

A figure is the time of one call of many in one program; each call takes the output of the previous one.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.harness.report import Report
from services.draft.kernels.base import Context, Paging
from services.draft.kernels.pallas_gpu import Tile, gpu_attention
from services.draft.model.layers.backend import attention
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS

KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
PAGE = 16
TILES = (Tile(16, 64, 4, 3), Tile(16, 128, 4, 3), Tile(32, 32, 4, 4), Tile(32, 64, 4, 3), Tile(64, 64, 8, 2))
SPLITS = (1, 8, 32)


@dataclass(frozen=True)
class Size:
    """Dimensions of the attention and the measured cells.

    cells: sessions, nodes of each in the step, tokens of context; repeats: calls in a program
    """

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    cells: tuple[tuple[int, int, int], ...] = (
        (1, 1, 1024), (1, 8, 1024), (1, 8, 8192), (4, 4, 8192), (16, 4, 2048), (64, 2, 2048), (1, 256, 4096),
    )  # fmt: skip
    repeats: int = 50
    read_bytes: int = 4 << 30


TINY = Size(4, 2, 16, ((1, 2, 40), (2, 2, 24)), 2, 1 << 20)


def main(argv: Sequence[str]) -> None:
    """Measure, and write docs/benchmarks/draft-kernels.*."""
    parser = argparse.ArgumentParser(prog="outrider bench draft-kernels", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="interpret tiny cases on the CPU to test this benchmark")
    flags = parser.parse_args(argv)
    platform = jax.default_backend()
    if not flags.tiny and platform not in KERNELS:
        raise SystemExit("JAX has no accelerator on this machine; --tiny tests this benchmark on the CPU")
    report = Report("draft-kernels", f"Attention of the draft service on a {platform.upper()} against its floor")
    report.columns = ("sessions", "rows", "context", "kernel", "us", "floor us", "of floor")
    run(TINY if flags.tiny else Size(), platform, report, interpret=flags.tiny)
    if not flags.tiny:
        report.write()


def run(size: Size, platform: str, report: Report, *, interpret: bool) -> None:
    """Measure every kernel on every cell. A kernel that fails becomes a note."""
    bandwidth = device_bandwidth(size.read_bytes)
    report.notes.append(f"Measured read bandwidth: {bandwidth / 1e9:,.0f} GB/s; bfloat16, pages of {PAGE} tokens.")
    for sessions, rows, context in size.cells:
        q, pool, seen = case(size, sessions, rows, context)
        floor = sessions * context * 2 * size.kv_heads * size.dim * pool.dtype.itemsize / bandwidth
        for name, kernel in kernels(KERNELS.get(platform, "pallas_gpu"), interpret):
            try:
                seconds = time_of(kernel, size.repeats, q, pool, seen)
            except Exception as error:
                report.notes.append(f"{name}, {sessions} x {rows}, {context}: {str(error).splitlines()[0]}")
                continue
            report.add(
                sessions=sessions, rows=rows, context=context, kernel=name,
                **{"us": 1e6 * seconds, "floor us": 1e6 * floor, "of floor": floor / seconds},
            )  # fmt: skip


def kernels(backend: Any, interpret: bool) -> Iterator[tuple[str, Callable[..., jax.Array]]]:
    """The selected tile, the plain twin, and other tiles and splits."""
    yield "picked", partial(attention, paging=Paging(PAGE, backend, interpret))
    yield "plain", partial(attention, paging=Paging(PAGE))
    if backend == "pallas_gpu":
        for tile, splits in itertools.product(TILES[:1] if interpret else TILES, SPLITS[:2] if interpret else SPLITS):
            name = f"{tile.lanes}x{tile.keys}, {tile.warps} warps, {tile.stages} stages, {splits} splits"
            yield name, partial(gpu_attention, page_size=PAGE, tile=tile, splits=splits, interpret=interpret)


def case(size: Size, sessions: int, rows: int, context: int) -> tuple[jax.Array, jax.Array, Context]:
    """Query, KV pool and context of sessions of equal length, each with a draft chain in its scratch slots.

    Pages are in random order. q: [S, R, H, D]; pool: [slots, 2, KV heads, D]; both bfloat16.
    """
    rng = np.random.default_rng(0)
    own = -(-context // PAGE) + SCRATCH_SLOTS // PAGE
    pages = 1 + rng.permutation(sessions * own).reshape(sessions, own)
    scratch = pages[:, -SCRATCH_SLOTS // PAGE :, None] * PAGE + np.arange(PAGE)
    mask = np.tril(np.ones((rows, SCRATCH_SLOTS), bool))
    seen = Context(
        jnp.asarray(pages[:, : -SCRATCH_SLOTS // PAGE], jnp.int32),
        jnp.full((sessions, rows), context, jnp.int32),
        jnp.asarray(scratch.reshape(sessions, -1), jnp.int32),
        jnp.broadcast_to(jnp.asarray(mask), (sessions, *mask.shape)),
    )
    q_key, pool_key = jax.random.split(jax.random.key(0))
    pool_shape = ((1 + pages.size) * PAGE, 2, size.kv_heads, size.dim)
    q = jax.random.normal(q_key, (sessions, rows, size.heads, size.dim), jnp.bfloat16)
    return q, jax.random.normal(pool_key, pool_shape, jnp.bfloat16), seen


def time_of(kernel: Callable[..., jax.Array], repeats: int, q: jax.Array, pool: jax.Array, seen: Context) -> float:
    """Seconds per call: the best of five programs of `repeats` calls."""

    @jax.jit
    def calls(q: jax.Array, pool: jax.Array, seen: Context) -> jax.Array:
        result: jax.Array = lax.fori_loop(0, repeats, lambda _, x: kernel(x, pool, seen), q)
        return result

    return _best(lambda: calls(q, pool, seen)) / repeats


def device_bandwidth(size: int) -> float:
    """Read bandwidth of the device in bytes/s: a sum over memory larger than its caches. size: in bytes."""
    numbers = jnp.ones(size // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    return size / _best(lambda: total(numbers))


def _best(once: Callable[[], jax.Array]) -> float:
    once().block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        once().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
