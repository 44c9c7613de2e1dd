"""Tensor parallelism with one process a rank. Rank 0 is the engine's process; the other ranks are workers.

    rank 0      engine -> LeadingRunner.forward -> broadcast the batch -> its share of the pass -> logits -> samples
    workers               run_worker            <- receive it          -> their share, keys and values of their heads

A broadcast is one packed array of integers: a batch, a move in the cache, or a new cache. The collectives inside the
model are those of `transformers`. Rank 0 holds a pipe to each worker: a worker ends when its pipe closes, however
rank 0 ended. If a worker ends by itself, the target ends, because no step can be computed without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from outrider.config import TargetConfig, to_argv
from outrider.process.python_command import python_command
from services.target.kernels.kv_cache import KVCache
from services.target.model.base import Model, Outputs, Runner
from services.target.model.loading.load import load
from services.target.model.loading.shards import check_devices
from services.target.step.batch import Batch, TokenArrays
from services.target.step.layout import Layout

log = logging.getLogger(__name__)

_WORKER_MODULE = "services.target.process.tensor_parallel_worker"
HOST = "127.0.0.1"
_CACHE, _BATCH, _MOVE = range(3)
_INLINE = 2048  # numbers in the first broadcast; longer messages need a second one
_JOIN_TIMEOUT = timedelta(minutes=10)  # until all ranks have imported the libraries and joined
_NO_TIMEOUT = timedelta(days=3650)  # an idle engine broadcasts nothing for any time
_EXIT_SECONDS = 5.0  # seconds that a worker has to end


def load_split(
    folder: Path, config: TargetConfig, on_death: Callable[[str], None]
) -> tuple[Model, TensorParallelWorkers]:
    """Start the workers and load a model sharded over all ranks. Raises ConfigError.

    on_death: called in a separate thread, with the reason, if a worker ends before `TensorParallelWorkers.stop`
    """
    check_devices(config.tp_size, config.device)
    workers = TensorParallelWorkers(folder, config, on_death)
    try:
        channel = join(workers.store, 0, config)
        model = load(folder, dataclasses.replace(config, device=_device(config, 0)))
    except BaseException:
        workers.stop()
        raise
    return dataclasses.replace(model, runner=LeadingRunner(model.runner, channel)), workers


def join(store: dist.Store, rank: int, config: TargetConfig) -> BroadcastChannel:
    """Join the process group of all ranks. Returns the channel of rank 0's broadcasts."""
    device = torch.device(_device(config, rank))
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(_threads(config.tp_size))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=config.tp_size,
        timeout=_JOIN_TIMEOUT,
    )
    return BroadcastChannel(dist.new_group(backend="gloo", timeout=_NO_TIMEOUT))


def _device(config: TargetConfig, rank: int) -> str:
    cuda = config.device != "cpu" and torch.cuda.is_available()
    return f"cuda:{rank}" if cuda else "cpu"


def _threads(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class TensorParallelWorkers:
    """The processes of ranks 1 and up, owned by rank 0."""

    def __init__(self, folder: Path, config: TargetConfig, on_death: Callable[[str], None]) -> None:
        self.store = dist.TCPStore(HOST, 0, config.tp_size, is_master=True, wait_for_workers=False)
        self._on_death = on_death
        self._stopping = threading.Event()
        environment = os.environ | {"OMP_NUM_THREADS": str(_threads(config.tp_size))}
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, config.tp_size):
            rank_config = dataclasses.replace(config, model_path=str(folder), device=_device(config, rank))
            command = python_command("-m", _WORKER_MODULE, str(rank), str(self.store.port), *to_argv(rank_config))
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment | {"LOCAL_RANK": str(rank)}, start_new_session=True
            )
            self.processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank {rank}", daemon=True).start()

    def stop(self) -> None:
        """End the workers. No step may be in progress."""
        self._stopping.set()
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if not self._stopping.is_set():
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            self._on_death(f"rank {rank} of {len(self.processes) + 1} {how}; the target cannot go on without it")


class BroadcastChannel:
    """Arrays of integers from rank 0 to all others, in order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buffer = torch.zeros(_INLINE, dtype=torch.int64)

    def send(self, kind: int, *arrays: NDArray[np.integer]) -> None:
        """Say something. arrays: of any integer type, one-dimensional; lengths are the receiver's to know."""
        body = np.concatenate([np.array([0, kind]), *arrays]).astype(np.int64)
        body[0] = len(body)
        inline = min(len(body), _INLINE)
        self._buffer[:inline] = torch.from_numpy(body[:inline])
        dist.broadcast(self._buffer, 0, self._group)
        if len(body) > _INLINE:
            dist.broadcast(torch.from_numpy(body[_INLINE:]), 0, self._group)

    def receive(self) -> tuple[int, NDArray[np.int64]]:
        """Receive rank 0's next message: its kind, and the concatenated arrays."""
        dist.broadcast(self._buffer, 0, self._group)
        body = self._buffer[: int(self._buffer[0])].numpy().copy()
        missing = int(self._buffer[0]) - len(body)
        if missing > 0:
            rest = torch.empty(missing, dtype=torch.int64)
            dist.broadcast(rest, 0, self._group)
            body = np.concatenate([body, rest.numpy()])
        return int(body[1]), body[2:]


class LeadingRunner:
    """Rank 0's runner: broadcasts each step to the workers before it computes its own share."""

    def __init__(self, runner: Runner, channel: BroadcastChannel) -> None:
        self._runner = runner
        self._channel = channel
        self._cache: KVCache | None = None

    def forward(self, batch: Batch, cache: KVCache) -> Outputs:
        """As any runner. A new cache is also made on the workers."""
        if cache is not self._cache:
            self._cache = cache
            self._channel.send(_CACHE, np.array([cache.pages, cache.page_size]))
            cache.on_move = self._move
        self._channel.send(_BATCH, *pack(batch))
        return self._runner.forward(batch, cache)

    def _move(self, sources: Tensor, destinations: Tensor) -> None:
        self._channel.send(_MOVE, sources.cpu().numpy(), destinations.cpu().numpy())

    def weights(self) -> Mapping[str, tuple[int, ...]]:
        """Nothing can be replaced, because each rank has a shard of every weight."""
        return {}

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace nothing."""
        assert not tensors, "no weights were offered"


@torch.inference_mode()
def run_worker(model: Model, channel: BroadcastChannel) -> None:
    """Execute rank 0's broadcasts until the process is ended from outside."""
    cache: KVCache | None = None
    while True:
        kind, body = channel.receive()
        if kind == _CACHE:
            pages, page_size = body.tolist()
            cache = None  # frees it before the new one is allocated
            cache = KVCache(model.shapes, pages, page_size, model.cache_dtype, model.device)
            continue
        assert cache is not None, "a cache comes before all else"
        if kind == _MOVE:
            sources, destinations = torch.from_numpy(body).to(model.device).chunk(2)
            cache.move(sources, destinations)
        else:
            model.runner.forward(unpack(body, model.device), cache)


_HEADER = 7


def pack(batch: Batch) -> list[NDArray[np.integer]]:
    """A batch as arrays of integers, without the parts that only rank 0 needs, such as the capture."""
    rows, spans = batch.rows, batch.layout
    header = np.array([
        len(rows.ids), len(rows.sampled), batch.sample_count, len(spans), len(spans.pages), len(spans.parents),
        spans.page_size,
    ])  # fmt: skip
    arrays = [rows.ids, rows.positions, rows.sampled]
    return [header, *arrays, spans.start, spans.committed, spans.nodes, spans.pages, spans.parents]


def unpack(body: NDArray[np.int64], device: torch.device) -> Batch:
    """The inverse of `pack`."""
    count, sampled, drawn, spans, pages, parents, page_size = body[:_HEADER].tolist()
    take = _Reader(body[_HEADER:])
    rows = TokenArrays(take(count), take(count), take(sampled))
    columns = take(spans), take(spans), take(spans)
    layout = Layout.of(*columns, take(pages).astype(np.int32), take(parents).astype(np.int32), page_size)
    return Batch(layout, rows, device, drawn)


class _Reader:
    """Reads arrays from the front of a concatenated one."""

    def __init__(self, body: NDArray[np.int64]) -> None:
        self._body = body

    def __call__(self, count: int) -> NDArray[np.int64]:
        taken, self._body = self._body[:count], self._body[count:]
        return taken
