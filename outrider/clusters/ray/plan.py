"""What is placed on the cluster: the units of each kind, what they occupy, and the flags of their processes.

A unit is what Ray places, and moves, as a whole: a placement group with a bundle of resources for each of its machines.

    target    one bundle with the GPUs of all its ranks, on one machine (STRICT_PACK); with --nnodes N bundles, on N
              machines (STRICT_SPREAD), whose ranks meet by the rendezvous of torch.distributed
    draft     one bundle
    gateway   one unit for all gateways, a bundle each, on different machines because of their ports
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from outrider.clusters.scaling import Bounds, Rules
from outrider.config import (
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    DraftConfig,
    GatewayConfig,
    GatewayOptions,
    ServeConfig,
    TargetConfig,
)
from outrider.config.access.callers import ADMIN_KEYS_VARIABLE, KEYS_VARIABLE
from outrider.config.ray import RayUpConfig
from outrider.drafts import resolve_drafter
from outrider.errors import ConfigError
from outrider.placement.cores import CorePlan
from outrider.placement.tree_shapes import tree_shape
from outrider.service_token import VARIABLE as TOKEN_VARIABLE
from outrider.service_token import new_token
from outrider.supervisor.app import check_values, draft_quantization
from outrider.supervisor.resolution import resolve_config

# Every service has cores or devices of its own.
_APART = CorePlan(target=(0,), draft=(1,), gateway=(2,))
_STOP_SECONDS = 60.0  # for a process to end, beside its --drain-timeout
_ANY_PORT = 1  # stands for a port that is chosen later, where numbers are checked


class Kind(StrEnum):
    """The kinds of units."""

    GATEWAY = "gateway"
    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True)
class Bundle:
    """What one process occupies on its machine."""

    cpus: int = 1
    gpus: int = 0
    tpus: int = 0

    @property
    def resources(self) -> dict[str, float]:
        """The bundle in Ray's words."""
        found = {"CPU": self.cpus, "GPU": self.gpus, "TPU": self.tpus}
        return {name: float(count) for name, count in found.items() if count}

    @property
    def on_cpu(self) -> bool:
        """True if the process has no accelerator."""
        return not (self.gpus or self.tpus)


@dataclass(frozen=True)
class UnitPlan:
    """Units of one kind: their bundles, how Ray spreads these, and the flags of the processes.

    environment: secrets of the processes, which no command line may show
    """

    kind: Kind
    config: TargetConfig | DraftConfig | GatewayConfig
    bundles: tuple[Bundle, ...]
    strategy: str
    environment: Mapping[str, str] = field(repr=False)

    @property
    def ranks_span_machines(self) -> bool:
        """True if the processes of a unit compute together."""
        return self.kind is Kind.TARGET and len(self.bundles) > 1

    @property
    def stop_seconds(self) -> float:
        """Time in which a process has ended in order."""
        return _STOP_SECONDS + (0.0 if isinstance(self.config, DraftConfig) else self.config.drain_timeout)


@dataclass(frozen=True)
class PoolPlan:
    """A whole pool."""

    name: str
    units: Mapping[Kind, UnitPlan]
    rules: Mapping[Kind, Rules]

    def bounds(self, kind: Kind) -> Bounds:
        """The smallest and largest number of units of a kind."""
        return self.rules[kind].bounds

    @property
    def stop_seconds(self) -> float:
        """Time in which all processes have ended in order, the gateways first."""
        return self.units[Kind.GATEWAY].stop_seconds + max(self.units[kind].stop_seconds for kind in Kind)


def plan_pool(config: RayUpConfig, cluster: Mapping[str, float]) -> PoolPlan:
    """The pool that flags ask for. cluster: the resources of all its machines, by Ray's names. Raises ConfigError."""
    _check(config)
    gpus = config.target_gpus
    if gpus is None:
        gpus = config.target.tp_size if cluster.get("GPU", 0) else 0
    serve = _resolved(config, gpus)
    token = config.service_token() or new_token()
    units = {
        Kind.GATEWAY: _gateways(config, serve, token),
        Kind.TARGET: _target(config, serve, gpus, token),
        Kind.DRAFT: _draft(config, serve, token),
    }
    drafts = Bounds.parse("--draft-replicas", config.draft_replicas, 0)
    if serve.draft.speculative_algorithm == "NONE":
        drafts = Bounds(0, 0)
    rules = Rules(
        Bounds(1, 1), config.scale_up_load, config.scale_down_load, config.scale_up_seconds,
        config.scale_down_seconds, config.scale_up_late,
    )  # fmt: skip
    return PoolPlan(config.name, units, {
        Kind.GATEWAY: rules,
        Kind.TARGET: replace(rules, bounds=Bounds.parse("--target-replicas", config.target_replicas, 1)),
        Kind.DRAFT: replace(rules, bounds=drafts),
    })  # fmt: skip


def _check(config: RayUpConfig) -> None:
    if not config.name or not config.name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError(f"--name {config.name!r}: write letters, digits, - and _")
    if config.gateways < 1:
        raise ConfigError(f"--gateways must be 1 or more, not {config.gateways}")
    for flag, count in (("--draft-cpus", config.draft_cpus), ("--gateway-cpus", config.gateway_cpus)):
        if count < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {count}")
    if not 0 < config.scale_down_load < config.scale_up_load <= 1:
        raise ConfigError(
            f"--scale-down-load {config.scale_down_load:g} and --scale-up-load {config.scale_up_load:g}: the first "
            "must be smaller, and both in (0, 1]; else replicas would be added and removed in turns"
        )
    for flag, seconds in (
        ("--scale-up-seconds", config.scale_up_seconds), ("--scale-down-seconds", config.scale_down_seconds),
        ("--wait", config.wait),
    ):  # fmt: skip
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{flag} must be 0 or more, not {seconds:g}")
    if not 0 < config.scale_up_late <= 1:
        raise ConfigError(f"--scale-up-late must lie in (0, 1], not {config.scale_up_late:g}")
    _check_devices(config)


def _check_devices(config: RayUpConfig) -> None:
    target, ranks = config.target, config.draft.draft_tp_size
    if target.nnodes > 1 and (target.node_rank or target.dist_init_addr):
        raise ConfigError("leave out --node-rank and --dist-init-addr: the controller chooses them for each target")
    if target.device.partition(":")[0] not in ("auto", "cpu", "cuda") or ":" in target.device or "," in target.device:
        raise ConfigError(f"--device {target.device}: Ray chooses the devices of a target; leave it out")
    if config.target_gpus and config.target_gpus != target.tp_size:
        raise ConfigError(
            f"--target-gpus {config.target_gpus} and --tp-size {target.tp_size}: a target has one GPU for each rank; "
            f"write --tp-size {config.target_gpus} as well"
        )
    if config.draft_gpus and config.draft_tpus:
        raise ConfigError("--draft-gpus and --draft-tpus: a draft computes on one kind of device; leave one out")
    for flag, count in (("--draft-gpus", config.draft_gpus), ("--draft-tpus", config.draft_tpus)):
        if count < 0 or (count and count != ranks):
            raise ConfigError(f"{flag} {count} and --draft-tp-size {ranks}: write the same number, or {flag} 0")


def _resolved(config: RayUpConfig, gpus: int) -> ServeConfig:
    """The services' flags with the drafter that AUTO means, for devices that Ray chooses. Raises ConfigError."""
    target = replace(config.target, device="cuda" if gpus else "cpu")
    draft = resolve_drafter(config.draft, target.model_path)
    if draft.speculative_algorithm in MODEL_ALGORITHMS:
        draft = replace(draft, draft_device="cuda" if config.draft_gpus else "tpu" if config.draft_tpus else "cpu")
    serve = ServeConfig(
        shared=config.shared, target=target, draft=draft, gateway=_with_some_port(config.gateway),
        service_token_file=config.service_token_file, log_level=config.log_level, log_format=config.log_format,
        otlp_traces_endpoint=config.otlp_traces_endpoint,
    )  # fmt: skip
    resolved = resolve_config(serve)
    check_values(resolved)
    if config.draft.speculative_algorithm == "AUTO":  # as with `serve`: the target may draft for itself, too
        resolved = replace(resolved, target=replace(resolved.target, self_speculation=target.self_speculation))
    return replace(resolved, gateway=config.gateway)


def _with_some_port(gateway: GatewayOptions) -> GatewayOptions:
    """With numbers that pass the check in place of port 0, which means a free port of the machine here."""
    return replace(gateway, port=gateway.port or _ANY_PORT, grpc_port=gateway.grpc_port or _ANY_PORT + 1)


def _observed(config: RayUpConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("log_level", "log_format", "otlp_traces_endpoint")}


def _target(config: RayUpConfig, serve: ServeConfig, gpus: int, token: str) -> UnitPlan:
    shape = tree_shape(serve.shared, serve.draft.speculative_algorithm)
    fixed = {} if shape is None else {"speculative_num_draft_tokens": shape.rows}
    target = TargetConfig(**asdict(serve.target), **(asdict(serve.shared) | fixed), **_observed(config))
    if (nodes := target.nnodes) > 1:
        replace(target, dist_init_addr="stand-in:1").check()
    else:
        target.check()
    here = gpus // nodes
    cpus = max(1, here) if config.target_cpus is None else config.target_cpus
    if cpus < 1:
        raise ConfigError(f"--target-cpus must be 1 or more, not {cpus}")
    bundles = (Bundle(cpus, here),) * nodes
    strategy = "STRICT_PACK" if nodes == 1 else "STRICT_SPREAD"
    return UnitPlan(Kind.TARGET, target, bundles, strategy, {TOKEN_VARIABLE: token})


def _draft(config: RayUpConfig, serve: ServeConfig, token: str) -> UnitPlan:
    options = replace(serve.draft, speculative_draft_model_quantization=draft_quantization(serve, _APART))
    reads_target = options.speculative_algorithm in FED_ALGORITHMS
    reads_target = reads_target or options.speculative_ngram_external_corpus_path is not None
    draft = DraftConfig(
        **asdict(options), **asdict(serve.shared), **_observed(config),
        model_path=serve.target.model_path if reads_target else None,
    )  # fmt: skip
    bundle = Bundle(config.draft_cpus, config.draft_gpus, config.draft_tpus)
    return UnitPlan(Kind.DRAFT, draft, (bundle,), "STRICT_PACK", {TOKEN_VARIABLE: token})


def _gateways(config: RayUpConfig, serve: ServeConfig, token: str) -> UnitPlan:
    """The keys go into the environment: files that hold them are on this machine alone."""
    given = serve.gateway
    keys = {KEYS_VARIABLE: given.client_keys(), ADMIN_KEYS_VARIABLE: given.admin_keys()}
    hidden = {name: " ".join(dict.fromkeys(found)) for name, found in keys.items() if found}
    options = replace(given, api_key=(), api_key_file=None, admin_api_key=None, admin_api_key_file=None)
    gateway = GatewayConfig(**asdict(options), **_observed(config), target=(), draft=())
    if gateway.control_socket is not None:
        raise ConfigError("leave out --control-socket: the controller has a socket of its own on each machine")
    strategy = "STRICT_SPREAD" if gateway.port else "SPREAD"
    bundles = (Bundle(config.gateway_cpus),) * config.gateways
    return UnitPlan(Kind.GATEWAY, gateway, bundles, strategy, {TOKEN_VARIABLE: token, **hidden})
