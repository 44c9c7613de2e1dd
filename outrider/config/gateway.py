"""Flags of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from outrider.config.access.callers import AccessOptions, ApiKeyOptions
from outrider.config.access.tls import ServiceTlsOptions, TlsOptions
from outrider.config.access.token import ServiceTokenOptions
from outrider.config.common import RequireDraftOptions, ServiceConfig, check_minimum
from outrider.errors import ConfigError

ToolCallParser = Literal["auto", "none", "hermes", "qwen25", "llama3", "deepseekv3"]
ReasoningParser = Literal["auto", "none", "deepseek-r1", "qwen3"]
GrpcFacade = Literal["vllm", "sglang"]
StreamTransport = Literal["grpc", "socket", "auto"]


@dataclass(frozen=True)
class EndpointOptions:
    """Ports of the gateway."""

    topic: ClassVar[str] = "network"

    host: str = "127.0.0.1"
    """Host that the gateway listens on."""
    port: int = 30000
    """Port of the REST service."""
    grpc_port: int = 30001
    """Port of the gRPC service."""
    gateway_workers: int = 1
    """Gateway processes that share both ports."""
    connect_timeout: float = 600.0
    """Maximum time to wait for the services at start-up, in seconds."""
    stream_transport: StreamTransport = "grpc"
    """Transport of the frames between gateway and services. grpc: bidirectional gRPC streams; socket: a Unix domain
    socket beside each stream, for services that listen on unix:/path of this machine; auto: socket where there is one,
    else grpc."""


@dataclass(frozen=True)
class AdmissionOptions:
    """Limits of the gateway."""

    topic: ClassVar[str] = "request limits"

    max_pending_requests: int = 4096
    """Maximum requests in progress, waiting ones included; further ones get 503 and Retry-After."""
    max_requests_per_key: int | None = None
    """Maximum requests in progress per API key; further ones get 429 and Retry-After. Default: no limit."""
    max_body_bytes: int = 4 << 20
    """Maximum size of a REST body or gRPC message, in bytes."""
    slow_reader_timeout: float = 60.0
    """Seconds after which a client that does not read its answer is disconnected. 0: never."""
    max_connections: int = 8192
    """Maximum REST connections of a gateway process; at the limit, a new one takes the place of the one that has waited
    longest without a request, and is refused with 503 if all have requests in progress."""
    client_timeout: float = 30.0
    """Maximum time that a REST client may take to send a request's headers, and maximum pause within its body, in
    seconds."""
    request_timeout: float | None = None
    """Maximum duration of a request, in seconds. Default: no limit."""
    drain_timeout: float = 5.0
    """Time that requests in progress have to finish when the gateway stops, in seconds; new requests are refused."""


@dataclass(frozen=True)
class ApiOptions:
    """How the gateway reads requests and writes answers."""

    topic: ClassVar[str] = "API"

    served_model_name: tuple[str, ...] = ()
    """Names of the model in requests; an answer has the name that its request has, or the first one. Default: the model
    path."""
    accept_any_model: bool = False
    """Answer requests that name another model, too, as SGLang does. By default they get 404, as from OpenAI and
    vLLM."""
    tool_call_parser: ToolCallParser = "auto"
    """Format in which the model writes tool calls. auto: found in the chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """Format in which the model marks reasoning: qwen3 writes <think> and </think>, deepseek-r1 only </think>. auto:
    found in the chat template and the prompt."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """Values for temperature, top_p, top_k, min_p and repetition_penalty where a request has none: from the model's
    generation_config.json (model), or temperature 1 without filters (openai)."""
    grpc_facades: tuple[GrpcFacade, ...] = ("vllm",)
    """Other engines' gRPC services that the gRPC port implements for their routers. A router uses one of them; SGLang's
    has no seeds."""
    disable_draft_self_test: bool = False
    """Skip the requests that check, when a model-based drafter connects, whether it was trained for the target."""


@dataclass(frozen=True)
class ReportOptions:
    """What the gateway reports about requests."""

    topic: ClassVar[str] = "observability"

    enable_log_requests: bool = False
    """Log one line per finished request: finish reason, tokens, times and speculation; never texts."""
    disable_vllm_metrics: bool = False
    """Leave out the metrics under vLLM's names, which vLLM's dashboards read."""
    disable_sglang_metrics: bool = False
    """Leave out the metrics under SGLang's names, which SGLang's dashboards read."""
    per_request_spec_decode_metrics: Literal["off", "summary", "detailed"] = "summary"
    """Speculation and times in each answer, in the shape of vLLM (`metrics`) and llama.cpp (`timings`)."""


@dataclass(frozen=True)
class GatewayOptions(
    TlsOptions, ReportOptions, ApiOptions, AdmissionOptions, AccessOptions, ApiKeyOptions, EndpointOptions
):
    """The gateway: REST and gRPC for clients, streams to the services."""

    def check(self) -> None:
        """Raise ConfigError for a number out of range, ports that collide, or keys that cannot be read."""
        counts = (
            "gateway_workers",
            "max_body_bytes",
            "max_connections",
            "max_pending_requests",
            "max_requests_per_key",
        )
        check_minimum(self, dict.fromkeys(counts, 1))
        self.check_model()
        if not self.client_timeout > 0:
            raise ConfigError(f"--client-timeout must be more than 0, not {self.client_timeout}")
        for flag, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            # The system replaces 0 by a free port that no client learns, and cuts higher numbers to 16 bits.
            if not 0 < port < 65536:
                raise ConfigError(f"{flag} {port} is no port; choose one from 1 to 65535")
        if self.port == self.grpc_port:
            raise ConfigError(f"--port and --grpc-port are both {self.port}; choose another for one of them")
        self.check_access()
        self.client_keys()
        self.admin_keys()
        self.networks_of_admins()

    def check_model(self) -> None:
        """Raise ConfigError for a flag of one model that is out of range."""
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout must be more than 0, or left out, not {self.request_timeout}")
        if not all(name.strip() for name in self.served_model_name):
            raise ConfigError("--served-model-name is empty; is a variable of the shell not set?")


@dataclass(frozen=True)
class ModelOptions:
    """The models that the gateway serves."""

    topic: ClassVar[str] = "model"

    models: str | None = None
    """File of several models behind this gateway (TOML): a table a model, with the model's name as its header and the
    model's own flags, such as target and draft. Read again at SIGHUP. Default: one model, from the flags."""
    model_path: str | None = None
    """Checkpoint that the targets must serve, as their own --model-path names it; other targets are refused. Default:
    that of the first target that is up."""


@dataclass(frozen=True)
class ServiceAddressOptions:
    """Services that the gateway connects to."""

    topic: ClassVar[str] = "network"

    target: tuple[str, ...] = ("127.0.0.1:30010",)
    """Addresses of target services: host:port, unix:/path, dns:name:port for all replicas that a DNS name has, or
    file:/path for those in a file, one a line. Without values the gateway waits until POST /workers adds one."""
    draft: tuple[str, ...] = ()
    """Addresses of draft services, as those of targets; of several kinds, a session goes to the first one with a free
    slot. Default: none, plain decoding."""
    discovery_interval: float = 5.0
    """Seconds between two looks at the DNS names and files among these addresses; a lost replica causes one at once."""
    draft_report: tuple[str, ...] = ()
    """Files in which a supervisor writes why a draft service is down, one for each of --draft. Default: none."""
    health_listen: str | None = None
    """Address of an additional gRPC port for health checks alone, without TLS. Default: none."""

    def draft_reports(self) -> dict[str, Path]:
        """The reports of draft services, by address."""
        return dict(zip(self.draft, map(Path, self.draft_report), strict=False))


@dataclass(frozen=True)
class BalanceOptions:
    """How sessions are divided among the replicas of a service."""

    topic: ClassVar[str] = "load balancing"

    cache_threshold: float = 0.3
    """Fraction of a prompt that a replica must have received before to be preferred for it; 1: by load alone."""
    balance_abs_threshold: int = 8
    """Sessions above the least loaded replica at which a replica loses its preference, if the next flag holds too."""
    balance_rel_threshold: float = 1.5
    """Multiple of the least loaded replica's sessions at which a replica loses its preference."""


@dataclass(frozen=True)
class GatewayConfig(
    BalanceOptions, RequireDraftOptions, ModelOptions, ServiceAddressOptions, GatewayOptions, ServiceTokenOptions,
    ServiceTlsOptions, ServiceConfig,
):  # fmt: skip
    """The gateway: REST and gRPC for clients, streams to the services."""

    common: ClassVar[tuple[str, ...]] = (
        "target", "draft", "models", "host", "port", "grpc_port", "gateway_workers", "api_key",
        "served_model_name", "log_level",
    )  # fmt: skip
