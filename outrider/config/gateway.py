"""Flags of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outrider.config.common import ServiceConfig, check_least
from outrider.config.tls import ServiceTlsOptions, TlsOptions
from outrider.errors import ConfigError

ToolCallParser = Literal["auto", "none", "hermes", "qwen25", "llama3", "deepseekv3"]
ReasoningParser = Literal["auto", "none", "deepseek-r1", "qwen3"]
GrpcFacade = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class GatewayOptions(TlsOptions):
    """The gateway: speaks OpenAI-style REST and gRPC with clients, and streams between the services."""

    host: str = "127.0.0.1"
    """Host that clients connect to."""
    port: int = 30000
    """Port of the REST service."""
    grpc_port: int = 30001
    """Port of the gRPC service."""
    gateway_workers: int = 1
    """Processes that share both ports."""
    served_model_name: str | None = None
    """Name of the model in requests and answers; by default the model path."""
    max_body_bytes: int = 4 << 20
    """Largest request: body over REST, message over gRPC."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must show one of, but for health and metrics; also those in OUTRIDER_API_KEY, with spaces
    between them. Without any, every client is served."""
    admin_api_key: str | None = None
    """Key that routes which control the targets ask for; without one, they are open to every client."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from browsers (CORS), or *; none by default."""
    request_timeout: float | None = None
    """Seconds that any answer may take, from its request to its end; by default without limit."""
    max_pending_requests: int = 4096
    """Most generations under way, waiting ones included; further ones are refused with 503 and Retry-After."""
    max_requests_per_key: int | None = None
    """Most requests of one key under way; further ones are refused with 429 and Retry-After. By default unlimited."""
    drain_timeout: float = 5.0
    """Seconds that requests under way get to end when the gateway is told to stop; new ones are refused meanwhile."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes calls of tools; auto looks at its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning: with <think> and </think>, of which deepseek-r1 leaves the first out; auto
    looks at its chat template and at the prompt."""
    sampling_defaults: Literal["model", "openai"] = "model"
    """What requests have that leave temperature, top_p, top_k, min_p or repetition_penalty out: what the model's
    generation_config.json says, or OpenAI's, a temperature of 1 and nothing cut off."""
    grpc_facades: tuple[GrpcFacade, ...] = ("vllm",)
    """Other engines' services that the gRPC port answers to, too, for routers made for those engines. A router that
    finds several takes one of them; SGLang's has no seeds."""
    enable_log_requests: bool = False
    """Log a line for every answer that ends: how it ended, tokens, times and speculation; never texts."""
    disable_vllm_metrics: bool = False
    """Leave out of the metrics what is told under vLLM's names, too, which its dashboards read."""
    disable_sglang_metrics: bool = False
    """Leave out of the metrics what is told under SGLang's names, too, which its dashboards read."""
    per_request_spec_decode_metrics: Literal["off", "summary", "detailed"] = "summary"
    """What answers tell of their speculation and times, in the shapes of vLLM (`metrics`) and llama.cpp (`timings`)."""
    disable_draft_self_test: bool = False
    """Ask no questions when a draft with a model comes up, to see whether it knows the target."""
    connect_timeout: float = 600.0
    """Seconds to wait for the services at start-up."""

    def check(self) -> None:
        """Raise ConfigError for numbers that cannot be or leave nobody served, and for keys that anybody has."""
        counts = ("gateway_workers", "max_body_bytes", "max_pending_requests", "max_requests_per_key")
        check_least(self, dict.fromkeys(counts, 1))
        if self.request_timeout is not None and not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout must be more than 0, or left out, not {self.request_timeout}")
        for flag, port in (("--port", self.port), ("--grpc-port", self.grpc_port)):
            # For 0 the system would take any that is free, which nobody learns of; for more, another, so much lower.
            if not 0 < port < 65536:
                raise ConfigError(f"{flag} {port} is no port; choose one from 1 to 65535")
        if self.port == self.grpc_port:
            raise ConfigError(f"--port and --grpc-port are both {self.port}; choose another for one of them")
        keys = {"--api-key": self.api_key, "--admin-api-key": (self.admin_api_key,)}
        for flag, values in keys.items():
            if any(value is not None and (not value or value != value.strip()) for value in values):
                raise ConfigError(f"{flag} is empty, or has spaces around it; is a variable of the shell not set?")


@dataclass(frozen=True)
class GatewayConfig(GatewayOptions, ServiceTlsOptions, ServiceConfig):
    """The gateway: speaks OpenAI-style REST and gRPC with clients, and streams between the services."""

    target: tuple[str, ...] = ("127.0.0.1:30010",)
    """Addresses of target services."""
    draft: tuple[str, ...] = ()
    """Addresses of draft services; without any, text is decoded plainly. Of several kinds, sessions go to the first one
    that has a place."""
    cache_threshold: float = 0.3
    """Several replicas: part of a prompt that one must have been sent before to be preferred; 1 goes by load alone."""
    balance_abs_threshold: int = 8
    """Several replicas: sessions more than the least loaded has, with which one is no longer preferred ..."""
    balance_rel_threshold: float = 1.5
    """... if they are also that many times as many."""
    health_listen: str | None = None
    """Address of a gRPC port for health checks alone, without TLS; by default none."""
