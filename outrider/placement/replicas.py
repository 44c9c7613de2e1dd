"""Replicas of the services on one machine: what each of them has of a list of devices, and of a pool's address.

--target-replicas 2 --tp-size 2 --target-devices cuda:0,cuda:1,cuda:2,cuda:3     one on 0 and 1, one on 2 and 3
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Literal

from outrider.errors import ConfigError

Role = Literal["target", "draft"]

# Flags of each service: devices, tensor-parallel size, number of replicas.
_FLAGS: dict[Role, tuple[str, str, str]] = {
    "target": ("--target-devices", "--tp-size", "--target-replicas"),
    "draft": ("--draft-devices", "--draft-tp-size", "--draft-replicas"),
}
GPU_KINDS = ("cuda", "gpu")
_TARGET_KINDS = ("auto", "cpu", "cuda")  # those of drafts are JAX's, which has plug-ins for more


def numbered(name: str, replicas: int) -> list[str]:
    """Names of replicas: the name alone for one, else with a number from 1."""
    return [name] if replicas == 1 else [f"{name}-{number}" for number in range(1, replicas + 1)]


def devices_of_replicas(
    role: Role, device: str, replicas: int, ranks: int, gpus: int | None = None, count_flag: str | None = None
) -> list[str]:
    """The device flag of each replica. Raises ConfigError, with the arithmetic, where devices and replicas do not fit.

    device: a kind for all (cpu), the first of several CUDA devices (cuda, cuda:2), or a list with one for each rank,
    where several replicas may have the same one. ranks: of one replica. gpus: on this machine, if that is known.
    count_flag: the flag that has the number of replicas; default that of `serve`
    """
    flag, ranks_flag, replicas_flag = _FLAGS[role]
    replicas_flag = count_flag or replicas_flag
    if replicas < 1 or ranks < 1:
        raise ConfigError(f"{replicas_flag} and {ranks_flag} must be 1 or more, not {min(replicas, ranks)}")
    needed = f"{replicas_flag} {replicas} with {ranks_flag} {ranks} needs {replicas * ranks} devices"
    names = [name.strip() for name in device.split(",")]
    for name in names:
        if not name or (role == "target" and name.partition(":")[0] not in _TARGET_KINDS):
            raise ConfigError(f"{flag} {device}: {name!r} is no device; write for example cpu or cuda:1")
    if len(names) == 1:
        if replicas == 1 or device.partition(":")[0] not in GPU_KINDS:
            return [device] * replicas
        names = _consecutive(flag, device, replicas * ranks, gpus, needed)
    elif len(names) != replicas * ranks:
        raise ConfigError(f"{needed}, and {flag} {device} names {len(names)}; name one for each, or change a number")
    groups = [names[first : first + ranks] for first in range(0, len(names), ranks)]
    for group in groups:
        if len(set(group)) < ranks:
            raise ConfigError(
                f"{flag} {device} gives a replica the devices {','.join(group)}; each of its {ranks} ranks needs one "
                "of its own"
            )
    return [",".join(group) for group in groups]


def _consecutive(flag: str, device: str, count: int, gpus: int | None, needed: str) -> list[str]:
    """As many CUDA devices from one on. gpus: on this machine. needed: why, for the error. Raises ConfigError."""
    kind, _, index = device.partition(":")
    if index and not index.isdigit():
        raise ConfigError(f"{flag} {device} has no number behind the colon; write for example cuda:1")
    first = int(index or 0)
    if gpus is not None and first + count > gpus:
        start = f" from {kind}:{first} on" if first else ""
        raise ConfigError(
            f"{needed}{start}, and this machine has {gpus}; lower one of the two, or name the devices with {flag}, "
            "where replicas may share one, such as cuda:0,cuda:0"
        )
    return [f"{kind}:{number}" for number in range(first, first + count)]


def gpu_numbers(device: str, count: int) -> list[int]:
    """Numbers of the GPUs behind a device flag, of `count` ranks; empty for other kinds of devices."""
    names = [name.strip().partition(":") for name in device.split(",")]
    if any(kind not in (*GPU_KINDS, "auto") for kind, _, _ in names):
        return []
    numbers = [int(index) if index.isdigit() else 0 for _, _, index in names]
    return numbers if len(numbers) > 1 else list(range(numbers[0], numbers[0] + count))


def device_numbers(devices: str) -> list[int]:
    """The numbers in a list of devices. Raises ValueError for a device without one."""
    return [int(name.partition(":")[2]) for name in devices.split(",")]


def check_draft_devices(
    device: str, count: int, flag: str = "--draft-device", count_flag: str = "--draft-tp-size"
) -> None:
    """Raise ConfigError for a list of devices that a draft cannot use. count: value of `count_flag`."""
    names = [name.strip().partition(":") for name in device.split(",")]
    if len(names) == 1:
        return
    if len(names) != count:
        raise ConfigError(
            f"{flag} {device} names {len(names)} devices for {count_flag} {count}; name one for each part"
        )
    if len({kind for kind, _, _ in names}) > 1 or not all(index.isdigit() for _, _, index in names):
        raise ConfigError(f"{flag} {device}: a list names devices of one kind with their numbers: cuda:2,cuda:3")
    if len({index for _, _, index in names}) < count:
        raise ConfigError(f"{flag} {device} names a device twice; each part of the draft needs its own")


def addresses_of_replicas(address: str, replicas: int, flag: str) -> list[str]:
    """The address of each replica: ports one after the other, or numbered Unix domain sockets. Raises ConfigError."""
    if replicas == 1:
        return [address]
    if address.startswith("unix:"):
        path = PurePosixPath(address.removeprefix("unix:"))
        return [f"unix:{path.with_stem(stem)}" for stem in numbered(path.stem, replicas)]
    host, _, port = address.rpartition(":")
    if not port.isdigit() or not 0 < int(port) <= 65536 - replicas:
        raise ConfigError(
            f"{flag} {address} with {replicas} replicas needs as many ports from there on, at most up to 65535"
        )
    return [f"{host}:{int(port) + number}" for number in range(replicas)]


def check_addresses(named: Sequence[tuple[str, str]]) -> None:
    """Raise ConfigError for two processes at one address. named: flag and address of each."""
    seen: dict[str, str] = {}
    for flag, address in named:
        if address in seen:
            raise ConfigError(
                f"{flag} and {seen[address]} meet at {address}, counting a port for each replica; choose another for "
                "one of them"
            )
        seen[address] = flag
