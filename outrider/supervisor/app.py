"""The life of `outrider serve`.

1. check the flags: ports in use, missing cores, a drafter without its model
2. prepare the target's checkpoint: the first run downloads or converts it
3. start the replicas of target and draft service, and the gateway, on their devices and cores, connected by private
   Unix domain sockets
4. wait until targets and gateway are healthy, then show the system's addresses
5. restart each process that ends, until a signal arrives, or a target or the gateway cannot start
6. stop them, the gateway first, so that no request loses its service

The system serves without its draft service, which loads its own checkpoint, again and again if need be. With
--require-draft it is treated as the others are.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from outrider.checkpoints import checkpoint
from outrider.checkpoints.vocabulary import check_same, of_checkpoint
from outrider.config import (
    BUILT_IN_ALGORITHMS,
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    DraftConfig,
    DraftOptions,
    GatewayConfig,
    GatewayOptions,
    ProcessConfig,
    ServeConfig,
    TargetConfig,
    format_cores,
    to_argv,
)
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError, EngineFault
from outrider.placement.cores import CorePlan, choose_cores
from outrider.placement.replicas import check_addresses, numbered
from outrider.placement.tree_shapes import draft_ahead, draft_niceness, draft_tree, tree_shape
from outrider.process.ports import check_socket_path, host_and_port, refuse_used_socket, socket_folder, take_port
from outrider.process.python_command import python_command
from outrider.process.startup import STARTUP
from outrider.service_token import make_token_file
from outrider.supervisor.display import Display, first_curl
from outrider.supervisor.draft_watch import DRAFT_BACKOFF, DraftWatch
from outrider.supervisor.hangs import SILENT_SECONDS
from outrider.supervisor.memory import check_model, share_devices
from outrider.supervisor.processes import EXIT_MISCONFIGURED, Child, stop_and_kill_events, supervise
from outrider.supervisor.replicas import device_of, replicas_of_draft, replicas_of_target
from outrider.supervisor.resolution import resolve_config, target_on_cpu
from outrider.telemetry import setup_logging

log = logging.getLogger(__name__)

TOKEN_FILE = "token"  # in the private folder
_POLL_SECONDS = 0.5  # between two updates of the start-up's progress


@dataclass(frozen=True)
class Processes:
    """The configurations of all processes: of each replica of the services, and of the gateway."""

    targets: tuple[TargetConfig, ...]
    drafts: tuple[DraftConfig, ...]
    gateway: GatewayConfig

    @property
    def target(self) -> TargetConfig:
        """The first target; the others differ in device, cores and address alone."""
        return self.targets[0]

    @property
    def draft(self) -> DraftConfig | None:
        """The first draft; None without a draft service."""
        return self.drafts[0] if self.drafts else None

    @property
    def services(self) -> list[tuple[str, TargetConfig | DraftConfig]]:
        """Name and configuration of each replica, the targets first."""
        named = numbered("target", len(self.targets)), numbered("draft", len(self.drafts))
        return [*zip(named[0], self.targets, strict=True), *zip(named[1], self.drafts, strict=True)]


def serve(config: ServeConfig, notes: Sequence[str] = ()) -> int:
    """Serve until a signal. Returns the exit code. Raises ConfigError or EngineFault if a process cannot start.

    notes: about the command line, which are logged
    """
    setup_logging("serve", config.log_level, config.log_format)
    for note in notes:
        log.warning("%s", note)
    STARTUP.done("Python and libraries")
    given, logged = config, set[str]()
    config = resolve_config(given, logged)
    check_flags(config)
    choose_cores(config)
    display = Display()
    signal.signal(signal.SIGTERM, _leave)
    try:
        absent = checkpoint.local_folder(config.target.model_path) is None
        prepare_models(config, display)
        if absent:  # the target's files are here now; they may hold MTP layers
            config = resolve_config(given, logged)
        cores = choose_cores(config)
        STARTUP.done("checks and conversion")
        with socket_folder("outrider-") as runtime:
            if config.service_token() is None:
                make_token_file(runtime / TOKEN_FILE)
            return asyncio.run(_run(configure(config, cores, runtime), display))
    except KeyboardInterrupt:
        return 0
    finally:
        display.close()


def check_flags(config: ServeConfig) -> None:
    """Raise ConfigError for flags that would fail only after the models are loaded, and for ports in use."""
    check_values(config)
    check_ports(config.gateway)
    if (path := config.gateway.control_socket) is not None:
        check_socket_path(path)
        refuse_used_socket(path)


def check_values(config: ServeConfig) -> None:
    """Raise ConfigError for flags that do not fit together."""
    draft, gateway = config.draft, config.gateway
    config.check_replicas()
    own_model = draft.speculative_algorithm in MODEL_ALGORITHMS
    own_model = own_model and draft.speculative_algorithm not in BUILT_IN_ALGORITHMS
    if own_model and draft.speculative_draft_model_path is None:
        raise ConfigError(
            f"{draft.speculative_algorithm} needs a draft model; name one with --speculative-draft-model-path"
        )
    if config.require_draft and draft.speculative_algorithm == "NONE":
        raise ConfigError("--require-draft needs a drafter; leave it out with --speculative-algorithm NONE")
    if config.target.node_rank > 0:
        raise ConfigError(
            f"--node-rank {config.target.node_rank}: only machine 0 serves; start `outrider target` here, with the "
            "flags of the target"
        )
    tree_shape(config.shared, draft.speculative_algorithm)
    config.service_token()
    gateway.server_tls()
    gateway.check()


def check_ports(gateway: GatewayOptions) -> None:
    """Raise ConfigError for a port of the gateway that is in use."""
    for flag, port in (("--port", gateway.port), ("--grpc-port", gateway.grpc_port)):
        take_port(gateway.host, port, flag).close()


def prepare_models(config: ServeConfig, display: Display) -> None:
    """Download and convert the target's model, and with --require-draft the draft's. Raises ConfigError.

    On a CPU most models are read from their GGUF file; the target converts the others.
    """
    target, draft = config.target.model_path, config.draft.speculative_draft_model_path
    display.line(f"preparing {checkpoint.display_name(target)}")
    folder = checkpoint.resolve(target, description=target_on_cpu(config))
    own_draft = config.draft.speculative_algorithm in MODEL_ALGORITHMS and draft is not None and draft != target
    if config.require_draft and own_draft and draft is not None:
        display.line(f"preparing {checkpoint.display_name(draft)}")
        options = config.draft
        other = checkpoint.resolve_draft(
            draft, options.speculative_draft_model_revision, options.speculative_draft_load_format
        )
        if config.draft.speculative_algorithm == "STANDALONE":  # other drafters use the target's tokens
            check_same(of_checkpoint(other, draft), of_checkpoint(folder, target))


def draft_quantization(config: ServeConfig, cores: CorePlan) -> str | None:
    """Quantization of the draft model: by default that of the target, as in SGLang, but at least 8 bits.

    On a CPU, which has no kernels for fp8, it is int8. A model that computes on the target's cores has a default of its
    own, whatever the target's format.
    """
    chosen, target = config.draft.speculative_draft_model_quantization, config.target.quantization
    if chosen is not None or target is None or config.draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return chosen
    if draft_ahead(config.draft, cores, target_device=config.target.device) == "off":
        return None
    return "int8" if target == "int4" or (target == "fp8" and target_on_cpu(config)) else target


def configure(config: ServeConfig, cores: CorePlan, runtime: Path) -> Processes:
    """The configurations of all processes. runtime: a private folder for sockets and the services' token.

    Raises ConfigError for a number out of range, and for replicas that do not fit devices or addresses.
    """
    shared = asdict(config.shared)
    observed = {name: getattr(config, name) for name in ("log_level", "log_format", "otlp_traces_endpoint")}
    own_token = config.service_token() is None
    observed["service_token_file"] = str(runtime / TOKEN_FILE) if own_token else config.service_token_file
    flags, algorithm = config.shared, config.draft.speculative_algorithm
    shape = tree_shape(flags, algorithm)
    target = TargetConfig(
        **asdict(config.target), **(shared if shape is None else shared | {"speculative_num_draft_tokens": shape.rows}),
        **observed, cores=format_cores(cores.target), listen=config.listen_target or f"unix:{runtime}/target.sock",
    )  # fmt: skip
    drafts: list[DraftConfig] = []
    if config.draft.speculative_algorithm != "NONE":
        options = replace(
            config.draft,
            speculative_draft_model_quantization=draft_quantization(config, cores),
            draft_ahead=draft_ahead(config.draft, cores, target_device=config.target.device),
        )
        if shape is None and (suited := draft_tree(flags, options, cores)) is not None:
            shared |= suited.flags()
        draft = DraftConfig(
            **asdict(options), **shared, **observed, cores=format_cores(cores.draft),
            niceness=draft_niceness(flags, options, cores),
            model_path=config.target.model_path if _draft_reads_target(config.draft) else None,
            listen=config.listen_draft or f"unix:{runtime}/draft.sock", require_draft=config.require_draft,
        )  # fmt: skip
        drafts = replicas_of_draft(draft, config.draft_replicas, cores)
    targets = replicas_of_target(target, config.target_replicas, cores)
    check_addresses([
        ("--port", host_and_port(config.gateway.host, config.gateway.port)),
        ("--grpc-port", host_and_port(config.gateway.host, config.gateway.grpc_port)),
        *(("--listen-target", one.listen) for one in targets), *(("--listen-draft", one.listen) for one in drafts),
    ])  # fmt: skip
    for one in targets:
        one.check()
    check_model(target)
    targets, drafts = share_devices(targets, drafts)
    control_socket = config.gateway.control_socket or f"{runtime}/control.sock"
    gateway = GatewayConfig(
        **(asdict(config.gateway) | {"control_socket": control_socket}), **observed, cores=format_cores(cores.gateway),
        target=tuple(one.listen for one in targets), draft=tuple(one.listen for one in drafts),
        require_draft=config.require_draft,
        draft_report=() if config.require_draft else tuple(
            f"{runtime}/{name}.report" for name in numbered("draft", len(drafts))
        ),
        health_listen=f"unix:{runtime}/gateway.sock",  # also answers while strangers use up the public ports
    )  # fmt: skip
    return Processes(tuple(targets), tuple(drafts), gateway)


def _draft_reads_target(draft: DraftOptions) -> bool:
    """True if the drafter reads the target's checkpoint: weights, or the tokenizer for a corpus."""
    fed = draft.speculative_algorithm in FED_ALGORITHMS
    return fed or draft.speculative_ngram_external_corpus_path is not None


def make_children(processes: Processes, display: Display, token: str | None = None) -> list[Child]:
    """The child processes, not started yet, the gateway last. token: of the services."""

    def child(name: str, config: ProcessConfig, address: str) -> Child:
        command = python_command("-um", "outrider", name.partition("-")[0], *to_argv(config))
        return Child(name, command, address, display.line, token=token, silent_seconds=SILENT_SECONDS)

    children = [child(name, config, config.listen) for name, config in processes.services]
    for one, (_, config) in zip(children, processes.services, strict=True):
        if isinstance(config, DraftConfig) and not config.require_draft:
            one.optional, one.backoff = True, DRAFT_BACKOFF
    children.append(child("gateway", processes.gateway, processes.gateway.health_listen or base_url(processes.gateway)))
    children[-1].extra_grace = processes.gateway.drain_timeout
    return children


def base_url(gateway: GatewayConfig) -> str:
    """URL of the gateway on this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(gateway.host, gateway.host)
    scheme = "https" if gateway.ssl_certfile else "http"
    return f"{scheme}://{host_and_port(host, gateway.port)}"


async def _run(processes: Processes, display: Display) -> int:
    stop, kill = stop_and_kill_events(display.close)
    for name, config in processes.services if len(processes.services) > 2 else ():
        log.info("%s: device %s, cores %s, at %s", name, device_of(config), config.cores, config.listen)
    children = make_children(processes, display, processes.gateway.service_token())
    failed = await supervise(children, _watch(processes, children, display), stop, kill)
    if failed is None:
        return 0
    message = f"the {failed.name} process does not start: {failed.reason}"
    raise ConfigError(message) if failed.gave_up == EXIT_MISCONFIGURED else EngineFault(message)


async def _watch(processes: Processes, children: Sequence[Child], display: Display) -> None:
    """Announce the system when it can serve, and follow the draft services that it can do without."""
    drafts = [child for child in children if child.optional]
    optional = [
        DraftWatch(child, Path(report), alone=len(drafts) == 1)
        for child, report in zip(drafts, processes.gateway.draft_report, strict=True)
    ]
    await asyncio.gather(_announce(processes, children, display), *(watch.run() for watch in optional))


async def _announce(processes: Processes, children: Sequence[Child], display: Display) -> None:
    """Show the progress of the start-up until the system can serve, then its addresses."""
    waiting = {asyncio.create_task(child.wait_ready()) for child in children if not child.optional}
    while waiting:
        display.starting({child.name: None if child.ready else child.progress for child in children})
        done, waiting = await asyncio.wait(waiting, timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    late = [
        (child.name, f"not ready ({child.progress or child.reason or 'starting'}); text is decoded plainly until it is")
        for child in children if child.optional and not child.ready
    ]  # fmt: skip
    STARTUP.done("processes")
    log.info("%s", STARTUP.describe())
    display.ready([*summary(processes), *late], first_curl(base_url(processes.gateway)))


def summary(processes: Processes) -> list[tuple[str, str]]:
    """Addresses, model, drafter and cores of the system, as names and values."""
    target, draft, gateway = processes.target, processes.draft, processes.gateway
    drafter: str = draft.speculative_algorithm if draft else "none"
    if draft is not None and draft.speculative_draft_model_path == str(DEFAULT_HEAD):
        drafter += ", the bundled head"
    elif draft is not None and draft.speculative_draft_model_path is not None:
        drafter += f" {checkpoint.display_name(draft.speculative_draft_model_path)}"
    if target.self_speculation != "off":
        drafter += "; self-speculation in the target, where it is faster"
    listen = [config.listen for _, config in processes.services]
    shared_token = gateway.service_token_file if not all(one.startswith("unix:") for one in listen) else None
    cores = [f"{name} {config.cores}" for name, config in processes.services]
    cores += [*([] if draft else ["draft -"]), f"gateway {gateway.cores}"]
    several = len(processes.services) > 2
    devices = [f"{name} {device_of(config)}" for name, config in processes.services]
    return [
        ("REST", f"{base_url(gateway)}/v1"),
        ("gRPC", host_and_port(gateway.host, gateway.grpc_port)),
        ("control", f"{gateway.control_socket} (see docs/weights.md)"),
        ("model", ", ".join(gateway.served_model_name) or checkpoint.display_name(target.model_path)),
        ("drafter", drafter),
        *([("token", f"{shared_token}, for other gateways of these services")] if shared_token else []),
        *([("devices", "; ".join(devices))] if several else []),
        ("cores", ("; " if several else ", ").join(cores)),
    ]


def _leave(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt
