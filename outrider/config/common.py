"""Flags that several processes have, and the types of their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from outrider.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DEFAULT_MODEL = "default"
AUTO_CORES = "auto"


@dataclass(frozen=True)
class CpuOptions:
    """CPU cores of a process."""

    topic: ClassVar[str] = "cores"

    cores: str | None = None
    """CPU cores of the process, such as "0-3,6", or "auto": the share that `outrider serve` would give it. The process
    starts one thread a core. Default: all cores."""
    niceness: int = 0
    """Scheduling niceness of the process, 0 to 19; a higher value gives way to other processes."""


@dataclass(frozen=True)
class MachineShareOptions:
    """How many replicas of this service share the machine."""

    topic: ClassVar[str] = "replicas"

    machine_replicas: int = 1
    """With --cores auto: processes of this service that start on this machine, such as containers. Each takes a share
    of the cores, and of the GPUs that it sees, that no other one has."""


@dataclass(frozen=True)
class LogOptions:
    """Log lines of a process."""

    topic: ClassVar[str] = "observability"

    log_level: LogLevel = "info"
    """Least severe level of the log lines that are written."""
    log_format: LogFormat = "text"
    """Format of log lines: text for people, or json with one object a line."""


@dataclass(frozen=True)
class TracingOptions:
    """Traces of a process."""

    topic: ClassVar[str] = "observability"

    otlp_traces_endpoint: str | None = None
    """OTLP endpoint that traces are sent to, such as http://127.0.0.1:4317; needs outrider[otel]. Default: no
    traces."""


@dataclass(frozen=True)
class ProcessConfig(LogOptions, CpuOptions):
    """Flags of every process."""


@dataclass(frozen=True)
class ServiceConfig(TracingOptions, ProcessConfig):
    """Flags of every process that serves requests."""


@dataclass(frozen=True)
class BatchOptions:
    """Size of the batch, for the target and the draft service."""

    topic: ClassVar[str] = "scheduling"

    max_running_requests: int = 48
    """Maximum number of sessions in the running batch."""


@dataclass(frozen=True)
class DraftTreeOptions:
    """Shape of draft trees, for the target and the draft service."""

    topic: ClassVar[str] = "speculation"

    speculative_num_steps: int | None = None
    """Depth of the draft tree: maximum number of draft tokens accepted per step and session. A model-based drafter
    builds exactly SGLang's tree if this flag and the next two are set. Default: the depth adapts to the session."""
    speculative_eagle_topk: int | None = None
    """Maximum children of a draft node, and nodes expanded per tree level. Default: adaptive."""
    speculative_num_draft_tokens: int | None = None
    """Tokens verified per session and step, the root included; for a chain (--speculative-eagle-topk 1) the depth + 1.
    Default: adaptive."""


@dataclass(frozen=True)
class PrefixCacheOptions:
    """Prefix cache of the target and the draft service."""

    topic: ClassVar[str] = "KV cache and memory"

    disable_radix_cache: bool = False
    """Disable the prefix cache, which shares KV pages between sessions that begin with the same tokens."""


@dataclass(frozen=True)
class RequireDraftOptions:
    """What happens without a draft."""

    topic: ClassVar[str] = "speculation"

    require_draft: bool = False
    """End with an error if the draft cannot be loaded, does not fit the target, or does not start. Default: decode
    plainly, report why, and use the draft once it is available."""


@dataclass(frozen=True)
class HangOptions:
    """What happens to a target or a draft service that hangs."""

    topic: ClassVar[str] = "scheduling"

    hang_timeout: float = 300.0
    """Seconds that a step may take: a service whose step takes longer reports NOT_SERVING and ends, so that it is
    restarted. Other work of the engine, such as taking over new weights, may take ten times as long; loading a model
    has no limit. 0: no limit."""


@dataclass(frozen=True)
class SharedOptions(HangOptions, PrefixCacheOptions, DraftTreeOptions, BatchOptions):
    """Flags that the target and the draft service share."""


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def check_minimum(config: Any, least: Mapping[str, int]) -> None:
    """Raise ConfigError for a field below its minimum. least: minimum by field name. A field that is None passes."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(f"{flag_of(name)} must be {bound} or more, not {value}")
