"""What several processes are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DEFAULT_MODEL = "default"
AUTO_CORES = "auto"


@dataclass(frozen=True)
class ProcessConfig:
    """What every process has."""

    cores: str | None = None
    """CPU cores of this process, such as "0-3,6"; all by default. Its threads are as many. "auto" is its share of a
    machine that target, draft and gateway have to themselves, as `outrider serve` divides it."""
    niceness: int = 0
    """How far this process gives way to others on its cores, 0 to 19."""
    log_level: LogLevel = "info"
    """Least severe log lines that are shown."""
    log_format: LogFormat = "text"
    """Log lines for people (text), or one JSON object an event."""


@dataclass(frozen=True)
class ServiceConfig(ProcessConfig):
    """What every process that serves has."""

    otlp_traces_endpoint: str | None = None
    """Where traces are sent by OTLP, such as http://127.0.0.1:4317; none are made by default. Needs outrider[otel]."""


@dataclass(frozen=True)
class SharedOptions:
    """What the target and the draft service are told alike."""

    max_running_requests: int = 48
    """Most sessions that run together."""
    speculative_num_steps: int | None = None
    """Depth of a draft: most draft tokens that one step can accept in a session. A drafter with a model grows exactly
    SGLang's tree if this and the next two are set, and a tree that adapts if none is."""
    speculative_eagle_topk: int | None = None
    """Most children of a draft node, and nodes of a level that get children."""
    speculative_num_draft_tokens: int | None = None
    """Rows verified per session and step, the root included; for a chain (--speculative-eagle-topk 1) its depth + 1."""
    disable_radix_cache: bool = False
    """Keep no KV pages for later sessions that begin with the same tokens."""


def check_least(config: Any, least: Mapping[str, int]) -> None:
    """Raise ConfigError for numbers below what they must be at least, by the names of their fields; None is none."""
    for name, bound in least.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(f"--{name.replace('_', '-')} must be {bound} or more, not {value}")
