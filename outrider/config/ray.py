"""Flags of `outrider ray`: a pool on a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import tyro

from outrider.config.access.token import ServiceTokenOptions
from outrider.config.common import LogOptions, SharedOptions, TracingOptions
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.target import TargetOptions


@dataclass(frozen=True)
class RayClusterOptions:
    """The Ray cluster, and the pool on it."""

    topic: ClassVar[str] = "Ray"

    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379, or ray://10.0.0.1:10001 from outside. Default: RAY_ADDRESS,
    else the cluster that this machine belongs to."""
    name: str = "outrider"
    """Name of the pool on the cluster, which may have several."""


@dataclass(frozen=True)
class RayPlacementOptions:
    """Replicas and what each of them occupies."""

    topic: ClassVar[str] = "Ray"

    target_replicas: str = "1"
    """Number of targets, or MIN:MAX, between which their load decides."""
    target_gpus: int | None = None
    """GPUs of each target, one for each rank of --tp-size; 0: it computes on CPUs. Default: --tp-size if the cluster
    has GPUs, else 0."""
    target_cpus: int | None = None
    """CPUs of each target, on each of its --nnodes machines. A target without GPUs is bound to as many cores. Default:
    its GPUs there, at least 1."""
    draft_replicas: str = "1"
    """Number of drafts, or MIN:MAX, between which their load and lag decide."""
    draft_gpus: int = 0
    """GPUs of each draft, as many as --draft-tp-size; 0: it computes on CPUs, or on --draft-tpus."""
    draft_tpus: int = 0
    """TPU chips of each draft, as many as --draft-tp-size."""
    draft_cpus: int = 1
    """CPUs of each draft. One without GPUs and TPUs is bound to as many cores."""
    gateways: int = 1
    """Number of gateways; each is on a machine of its own, unless --port is 0."""
    gateway_cpus: int = 1
    """CPUs of each gateway."""


@dataclass(frozen=True)
class RayScalingOptions:
    """When replicas are added and removed."""

    topic: ClassVar[str] = "Ray"

    scale_up_load: float = 0.8
    """A replica is added while sessions, over those that the replicas can run, are more than this, or sessions wait."""
    scale_down_load: float = 0.5
    """A replica is removed while the load of the others would be less than this."""
    scale_up_seconds: float = 15.0
    """Time for which the load must call for a further replica, in seconds."""
    scale_down_seconds: float = 300.0
    """Time for which the load must call for one replica fewer, in seconds."""
    scale_up_late: float = 0.2
    """A draft is also added while more than this fraction of steps get their draft tokens too late."""


@dataclass(frozen=True)
class RayWaitOptions:
    """How long `outrider ray up` waits."""

    topic: ClassVar[str] = "Ray"

    wait: float = 1800.0
    """Seconds to wait until the pool serves; it goes on starting afterwards. 0: return once it is placed."""


@dataclass(frozen=True)
class RayUpConfig(
    RayWaitOptions, RayScalingOptions, RayPlacementOptions, RayClusterOptions, TracingOptions, LogOptions,
    ServiceTokenOptions,
):  # fmt: skip
    """Start targets, drafts and gateways on a Ray cluster, and return once they serve."""

    common: ClassVar[tuple[str, ...]] = (
        "address", "model_path", "target_replicas", "target_gpus", "tp_size", "draft_replicas", "draft_gpus",
        "speculative_algorithm", "gateways", "host", "port", "api_key_file",
    )  # fmt: skip

    shared: tyro.conf.OmitArgPrefixes[SharedOptions] = field(default_factory=SharedOptions)
    target: tyro.conf.OmitArgPrefixes[TargetOptions] = field(default_factory=TargetOptions)
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = field(default_factory=DraftOptions)
    gateway: tyro.conf.OmitArgPrefixes[GatewayOptions] = field(default_factory=GatewayOptions)


@dataclass(frozen=True)
class RayStatusOptions:
    """What `outrider ray status` prints."""

    topic: ClassVar[str] = "Ray"

    json: bool = False
    """Print the state of the pool as JSON."""


@dataclass(frozen=True)
class RayStatusConfig(RayStatusOptions, RayClusterOptions):
    """Show the replicas of a pool on a Ray cluster, where they run, and their load."""

    common: ClassVar[tuple[str, ...]] = ("address", "name", "json")


@dataclass(frozen=True)
class RayDownConfig(RayClusterOptions):
    """Stop a pool on a Ray cluster. Requests in progress have --drain-timeout seconds to finish."""

    common: ClassVar[tuple[str, ...]] = ("address", "name")
