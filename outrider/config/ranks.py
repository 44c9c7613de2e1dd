"""Tensor-parallel ranks of the target: on which machine and device each of them computes.

--tp-size 4 --device cuda:2,cuda:3 --nnodes 2 --node-rank 1      ranks 2 and 3, on devices 2 and 3 of this machine
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.errors import ConfigError


class RankOptions(Protocol):
    """What decides where ranks compute: fields of the target's configuration."""

    @property
    def tp_size(self) -> int: ...
    @property
    def nnodes(self) -> int: ...
    @property
    def node_rank(self) -> int: ...
    @property
    def dist_init_addr(self) -> str | None: ...
    @property
    def device(self) -> str: ...


class RankedConfig(RankOptions, Protocol):
    """What several ranks may not be able to do, beside."""

    @property
    def deterministic(self) -> bool: ...
    @property
    def self_speculation(self) -> str: ...


@dataclass(frozen=True)
class RankPlaces:
    """The ranks of this machine. size: ranks on all machines; first: the first one here; devices: of those here."""

    size: int
    first: int
    devices: tuple[str, ...]

    @property
    def here(self) -> range:
        """The ranks of this machine."""
        return range(self.first, self.first + len(self.devices))

    def device(self, rank: int) -> str:
        """The device of a rank of this machine."""
        return self.devices[rank - self.first]


def rank_places(config: RankOptions) -> RankPlaces:
    """Where the ranks of a target compute. Raises ConfigError for numbers and devices that do not fit together."""
    size, nodes, node = config.tp_size, config.nnodes, config.node_rank
    if size < 1:
        raise ConfigError(f"--tp-size must be 1 or more, not {size}")
    if nodes < 1 or size % nodes:
        raise ConfigError(f"--nnodes {nodes} must divide --tp-size {size}; all machines compute as many ranks")
    if not 0 <= node < nodes:
        raise ConfigError(f"--node-rank must lie in [0, {nodes - 1}] with --nnodes {nodes}, not {node}")
    if nodes > 1 and not _is_address(config.dist_init_addr):
        raise ConfigError(
            f"--nnodes {nodes} needs --dist-init-addr HOST:PORT, an address of the machine with --node-rank 0 that the "
            "others reach, the same on all of them"
        )
    if nodes == 1 and config.dist_init_addr is not None:
        raise ConfigError("--dist-init-addr is for several machines; leave it out, or add --nnodes and --node-rank")
    count = size // nodes
    return RankPlaces(size, node * count, device_names(config.device, count))


def device_names(device: str, count: int) -> tuple[str, ...]:
    """The devices of --device for a number of ranks: one each, or the first of several. Raises ConfigError."""
    names = tuple(name.strip() for name in device.split(","))
    if len(names) == 1:
        kind, _, index = device.partition(":")
        if kind != "cuda":
            return (device,) * count
        if count == 1:
            return (device,)
        return tuple(f"{kind}:{int(index or 0) + number}" for number in range(count))
    if len(names) != count:
        raise ConfigError(f"--device {device} names {len(names)} devices for {count} ranks; name one for each rank")
    if any(name.partition(":")[0] != "cuda" or not name.partition(":")[2].isdigit() for name in names):
        raise ConfigError(f"--device {device}: a list names CUDA devices, such as cuda:2,cuda:3")
    if len(set(names)) < len(names):
        raise ConfigError(f"--device {device} names a device twice; each rank needs its own")
    return names


def check_ranks(config: RankedConfig) -> None:
    """Raise ConfigError for what several ranks cannot do."""
    places = rank_places(config)
    if places.size == 1:
        return
    flag = f"--tp-size {places.size}"
    if config.deterministic:
        raise ConfigError(
            f"--deterministic does not go with {flag}, because the order in which ranks are summed may depend on the "
            "batch; leave one out"
        )
    if config.self_speculation not in ("auto", "off"):
        raise ConfigError(
            f"--self-speculation {config.self_speculation} and {flag}: the target drafts for itself only where one "
            "process computes the whole model; leave one of them out"
        )


def _is_address(address: str | None) -> bool:
    host, _, port = (address or "").rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 1 << 16
