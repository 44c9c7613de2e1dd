"""Flags of the supervisor, which starts all processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from outrider.config.access.token import ServiceTokenOptions
from outrider.config.common import LogOptions, RequireDraftOptions, SharedOptions, TracingOptions, check_minimum
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.target import TargetOptions


@dataclass(frozen=True)
class MachineOptions:
    """CPU cores of all processes."""

    topic: ClassVar[str] = "cores"

    cores: str | None = None
    """CPU cores that the processes divide among themselves, such as "0-3,6". Default: all cores."""
    cores_target: str | None = None
    """CPU cores of the target service, which its replicas divide. Default: a share of --cores."""
    cores_draft: str | None = None
    """CPU cores of the draft service, which its replicas divide. Default: a share of --cores."""
    cores_gateway: str | None = None
    """CPU cores of the gateway. Default: a share of --cores."""


@dataclass(frozen=True)
class ReplicaOptions:
    """How many processes of each service run on this machine."""

    topic: ClassVar[str] = "replicas"

    target_replicas: Annotated[int, tyro.conf.arg(aliases=["--data-parallel-size", "--dp-size"])] = 1
    """Target processes behind the gateway: each has --tp-size devices of its own, or on a CPU its share of
    --cores-target."""
    draft_replicas: int = 1
    """Draft processes: each has --draft-tp-size devices, or on a CPU its share of --cores-draft. Any of them drafts for
    any target."""

    def check_replicas(self) -> None:
        """Raise ConfigError for a number out of range."""
        check_minimum(self, {"target_replicas": 1, "draft_replicas": 1})


@dataclass(frozen=True)
class ServiceListenOptions:
    """Addresses of the services."""

    topic: ClassVar[str] = "network"

    listen_target: str | None = None
    """Address that the target service listens on, host:port or unix:/path; its replicas have one port each from there
    on, or unix:/path-1 and so on. Default: private Unix domain sockets."""
    listen_draft: str | None = None
    """Address that the draft service listens on, as that of the target. Default: private Unix domain sockets."""


@dataclass(frozen=True)
class DryRunOptions:
    """What would be started."""

    topic: ClassVar[str] = "observability"

    dry_run: Literal["off", "text", "json"] = "off"
    """Show the resolved flags, devices, cores and memory plan of each process, and exit: for people (text, the meaning
    of --dry-run alone) or as JSON. No process is started, no model downloaded and no host contacted."""


@dataclass(frozen=True)
class ServeConfig(
    DryRunOptions, RequireDraftOptions, TracingOptions, LogOptions, ServiceTokenOptions, ServiceListenOptions,
    MachineOptions, ReplicaOptions,
):  # fmt: skip
    """Start the target service, the draft service and the gateway on this machine and restart them when they end."""

    common: ClassVar[tuple[str, ...]] = (
        "model_path", "dtype", "quantization", "tp_size", "speculative_algorithm", "speculative_draft_model_path",
        "host", "port", "api_key", "max_running_requests",
    )  # fmt: skip

    shared: tyro.conf.OmitArgPrefixes[SharedOptions] = field(default_factory=SharedOptions)
    target: tyro.conf.OmitArgPrefixes[TargetOptions] = field(default_factory=TargetOptions)
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = field(default_factory=DraftOptions)
    gateway: tyro.conf.OmitArgPrefixes[GatewayOptions] = field(default_factory=GatewayOptions)


@dataclass(frozen=True)
class DoctorOptions:
    """What the doctor prints."""

    topic: ClassVar[str] = "observability"

    json: bool = False
    """Print the findings as JSON."""
    memory_table: bool = False
    """Print instead what fits GPUs of several sizes, by the plan of their memory."""


@dataclass(frozen=True)
class DoctorConfig(DoctorOptions, ServeConfig):
    """Report what each service would run on here, and why, with the flags of `outrider serve`.

    Nothing is started or downloaded. The exit code is 1 if there is a problem.
    """

    common: ClassVar[tuple[str, ...]] = ("json", "memory_table", *ServeConfig.common)
