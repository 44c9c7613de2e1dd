"""How ranks find one another: `torch.distributed`'s store at an address, and the process group of all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig, flag_of
from outrider.errors import ConfigError
from services.target.process.ranks.channel import Channel

HOST = "127.0.0.1"  # of ranks on one machine
_JOIN_TIMEOUT = timedelta(minutes=10)  # until all ranks have imported the libraries and joined
_LOAD_TIMEOUT = timedelta(hours=2)  # between two ranks that load weights
_NO_TIMEOUT = timedelta(days=3650)  # an idle engine broadcasts nothing for any time
_FLAGS = "outrider/flags"
# Flags that may differ between the machines of one target.
_OWN = {
    "device", "node_rank", "listen", "cores", "niceness", "log_level", "log_format", "model_path",
    "service_token_file", "otlp_traces_endpoint", "network_cores",
}  # fmt: skip


def host(folder: Path, config: TargetConfig) -> dist.TCPStore:
    """Rank 0's store, which the other ranks connect to. Raises ConfigError for an address in use."""
    name, _, port = (config.dist_init_addr or f"{HOST}:0").rpartition(":")
    try:
        store = dist.TCPStore(
            name.strip("[]"), int(port), config.tp_size, is_master=True, timeout=_JOIN_TIMEOUT, wait_for_workers=False
        )
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--dist-init-addr {config.dist_init_addr} cannot be used here: {reason}") from None
    store.set(_FLAGS, json.dumps(_facts(folder, config)))
    return store


def connect(address: str) -> dist.TCPStore:
    """The store of rank 0. Raises ConfigError if it does not answer."""
    name, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(name.strip("[]"), int(port), is_master=False, timeout=_JOIN_TIMEOUT)
    except RuntimeError as error:
        raise ConfigError(f"rank 0 does not answer at {address}: {str(error).splitlines()[0]}") from None


def join(store: dist.Store, rank: int, config: TargetConfig) -> Channel:
    """Join the process group of all ranks. config: with the folder and device of this rank.

    Raises ConfigError for other flags than rank 0's, or other weights.
    """
    if rank > 0:
        _check_same(json.loads(store.get(_FLAGS)), _facts(Path(config.model_path), config), rank)
    cuda = config.device.startswith("cuda")
    device = torch.device(config.device)
    if cuda:
        torch.cuda.set_device(device)
        os.environ["LOCAL_RANK"] = str(device.index or 0)  # the device that `transformers` loads to
    else:
        torch.set_num_threads(threads(config))
        os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=store, rank=rank, world_size=config.tp_size,
        timeout=_LOAD_TIMEOUT,
    )  # fmt: skip
    return Channel(dist.new_group(backend="gloo", timeout=_NO_TIMEOUT))


def threads(config: TargetConfig) -> int:
    """Threads of each rank on a CPU."""
    return max(1, len(os.sched_getaffinity(0)) * config.nnodes // config.tp_size)


def _facts(folder: Path, config: TargetConfig) -> dict[str, object]:
    """What all ranks must have in common, as JSON has it."""
    flags = {flag_of(name): value for name, value in asdict(config).items() if name not in _OWN}
    facts: dict[str, object] = json.loads(json.dumps(flags, default=str))
    if config.nnodes > 1:
        facts["weights of the fingerprint"] = checkpoint.fingerprint(folder)
    return facts


def _check_same(theirs: Mapping[str, object], mine: Mapping[str, object], rank: int) -> None:
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"rank {rank} has {name} {value}, rank 0 has {theirs.get(name)}; all machines of a target need the same"
            )
