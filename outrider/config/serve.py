"""Flags of the supervisor, which starts all processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import tyro

from outrider.config.common import LogFormat, LogLevel, SharedOptions
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.target import TargetOptions


@dataclass(frozen=True)
class ServeConfig:
    """All three processes on this machine, under one supervisor."""

    shared: tyro.conf.OmitArgPrefixes[SharedOptions] = field(default_factory=SharedOptions)
    target: tyro.conf.OmitArgPrefixes[TargetOptions] = field(default_factory=TargetOptions)
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = field(default_factory=DraftOptions)
    gateway: tyro.conf.OmitArgPrefixes[GatewayOptions] = field(default_factory=GatewayOptions)
    cores: str | None = None
    """CPU cores that the processes divide among themselves, such as "0-3,6"; all by default."""
    cores_target: str | None = None
    """CPU cores of the target service; by default a share of --cores."""
    cores_draft: str | None = None
    """CPU cores of the draft service; by default a share of --cores."""
    cores_gateway: str | None = None
    """CPU cores of the gateway; by default a share of --cores."""
    listen_target: str | None = None
    """Address of the target service, host:port or unix:/path; by default a private Unix domain socket."""
    listen_draft: str | None = None
    """Address of the draft service, host:port or unix:/path; by default a private Unix domain socket."""
    log_level: LogLevel = "info"
    """Least severe log lines that are shown."""
    log_format: LogFormat = "text"
    """Log lines for people (text), or one JSON object an event."""
    otlp_traces_endpoint: str | None = None
    """Where all processes send traces by OTLP, such as http://127.0.0.1:4317; none are made by default. Needs
    outrider[otel]."""
