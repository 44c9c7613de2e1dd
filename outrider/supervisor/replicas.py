"""The replicas of `outrider serve`: their devices, which flags name or which are the machine's, cores and addresses."""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.config import MODEL_ALGORITHMS, DraftConfig, ServeConfig, TargetConfig, format_cores
from outrider.errors import ConfigError
from outrider.placement.cores import CorePlan, share_cores
from outrider.placement.devices import gpus, tpu_chips
from outrider.placement.replicas import addresses_of_replicas, devices_of_replicas, gpu_numbers, numbered
from outrider.supervisor.memory import draft_gpus, target_gpus

log = logging.getLogger(__name__)


def with_devices(config: ServeConfig) -> ServeConfig:
    """With a device for each replica, where a flag or the machine's GPUs give one. Raises ConfigError."""
    targets = target_devices(config)
    if config.target_replicas > 1:
        config = replace(config, target=replace(config.target, device=_joined(targets)))
    if config.draft_replicas > 1 and config.draft.speculative_algorithm == "NONE":
        log.warning(
            "--draft-replicas %d starts no draft, because of --speculative-algorithm NONE; leave one of them out",
            config.draft_replicas,
        )
    drafts = draft_devices(config, targets)
    if config.draft.draft_device == "auto" and drafts[0] != "auto":
        free = set(_numbers(drafts)).isdisjoint(_used(config, targets))
        log.info(
            "the draft service uses %s, which the target %s; --draft-device names another device",
            ", ".join(dict.fromkeys(drafts)),
            "leaves free" if free else "uses, too",
        )
    if config.draft_replicas > 1 or drafts[0] != "auto":
        config = replace(config, draft=replace(config.draft, draft_device=_joined(drafts)))
    return config


def target_devices(config: ServeConfig) -> list[str]:
    """--device of each target replica. Raises ConfigError where devices and replicas do not fit."""
    target, replicas = config.target, config.target_replicas
    ranks = target.tp_size // max(1, target.nnodes)
    if replicas <= 1:
        return [target.device]
    if target.nnodes > 1:
        raise ConfigError(
            f"--target-replicas {replicas} with --nnodes {target.nnodes}: replicas of `serve` are on one machine; "
            "start each target with `outrider target` on its machines, and name them to the gateway with --target"
        )
    device = "cuda" if target.device == "auto" and target_gpus(target) else target.device
    return devices_of_replicas("target", device, replicas, ranks, len(gpus()) or None)


def draft_devices(config: ServeConfig, targets: list[str]) -> list[str]:
    """--draft-device of each draft replica. auto: GPUs that no target uses, which drafts share where they are few; for
    several drafts on a machine without such GPUs, those of the targets in turns. Raises ConfigError.

    "auto" remains where JAX chooses the device. targets: devices of the targets
    """
    draft, replicas = config.draft, config.draft_replicas
    if draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return [draft.draft_device] * max(1, replicas)
    if replicas > 1 and _on_tpu(draft.draft_device, with_gpu=bool(draft_gpus(draft))):
        raise ConfigError(
            f"--draft-replicas {replicas}: one process has all TPU chips of a machine; use one draft, with "
            "--draft-tp-size for several chips, or name another --draft-device"
        )
    if draft.draft_device != "auto":
        if replicas <= 1:
            return [draft.draft_device]
        return devices_of_replicas("draft", draft.draft_device, replicas, draft.draft_tp_size, len(gpus()) or None)
    used, size = _used(config, targets), draft.draft_tp_size
    if not draft_gpus(draft) or (replicas <= 1 and not used):
        return ["auto"] * max(1, replicas)
    groups = _groups([gpu.index for gpu in gpus() if gpu.index not in used], size)
    if not groups and replicas > 1:
        groups = _groups(sorted(set(used)), size)
    return [groups[number % len(groups)] if groups else "auto" for number in range(replicas)]


def _groups(numbers: list[int], size: int) -> list[str]:
    """Device flags of groups of GPUs, neighbours where there are some."""
    return [
        _joined([f"cuda:{number}" for number in numbers[first : first + size]])
        for first in range(0, len(numbers) - size + 1, max(1, size))
    ]


def _used(config: ServeConfig, targets: list[str]) -> list[int]:
    """Numbers of the GPUs that targets use."""
    return [number for device in targets for number in target_gpus(replace(config.target, device=device))]


def _numbers(devices: list[str]) -> list[int]:
    return [number for device in devices for number in gpu_numbers(device, 1)]


def _on_tpu(device: str, *, with_gpu: bool) -> bool:
    return device.startswith("tpu") or (device == "auto" and not with_gpu and tpu_chips() > 0)


def _joined(devices: list[str]) -> str:
    """One flag for all: the kind, where it is the same for all, or a list."""
    kinds = set(devices)
    return kinds.pop() if len(kinds) == 1 and ":" not in devices[0] else ",".join(devices)


def replicas_of_target(target: TargetConfig, count: int, cores: CorePlan) -> list[TargetConfig]:
    """The target replicas, each with its devices, cores and address. Raises ConfigError where these do not fit."""
    devices = [target.device]
    if count > 1:
        devices = devices_of_replicas("target", target.device, count, target.tp_size)
    own = zip(devices, _cores("target", cores.target, count), _addresses("target", target, count), strict=True)
    return [replace(target, device=device, cores=format_cores(one), listen=listen) for device, one, listen in own]


def replicas_of_draft(draft: DraftConfig, count: int, cores: CorePlan) -> list[DraftConfig]:
    """The draft replicas, each with its devices, cores, address, and folder for what it learns. Raises ConfigError."""
    devices = [draft.draft_device]
    if count > 1:
        devices = devices_of_replicas("draft", draft.draft_device, count, draft.draft_tp_size)
    own = zip(devices, _cores("draft", cores.draft, count), _addresses("draft", draft, count), strict=True)
    folder = draft.online_output
    learned = [folder] * count
    if folder is not None and count > 1:
        learned = [f"{folder}/{name}" for name in numbered("draft", count)]
    return [
        replace(
            draft, draft_device=device, cores=format_cores(one), listen=listen, online_output=output,
            network_cores=format_cores(sorted({*one, *cores.shared})) if cores.shared else None,
        )
        for (device, one, listen), output in zip(own, learned, strict=True)
    ]  # fmt: skip


def device_of(config: TargetConfig | DraftConfig) -> str:
    """The device flag of a replica."""
    return config.device if isinstance(config, TargetConfig) else config.draft_device


def _addresses(role: str, config: TargetConfig | DraftConfig, count: int) -> list[str]:
    return addresses_of_replicas(config.listen, count, f"--listen-{role}")


def _cores(role: str, cores: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    if count > len(cores):
        log.warning(
            "%d %s replicas share the cores %s and slow one another down; lower --%s-replicas, or give them more cores",
            count,
            role,
            format_cores(cores),
            role,
        )
    return share_cores(cores, count)
