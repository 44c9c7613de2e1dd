"""Flags of the processes, as frozen dataclasses; parsed once at the start of a process, never read from anywhere else.

Options that only one process has stand in a class of their own (`TargetOptions`, ...); a process's configuration adds
what depends on where it runs (`TargetConfig`, ...); `ServeConfig` takes every option once and makes all three.

Flags that SGLang users know keep SGLang's names and meaning. A field's docstring is the flag's help text.
"""

from outrider.config.argv import format_cores, parse_cores, plain_argv, to_argv
from outrider.config.common import AUTO_CORES, DEFAULT_MODEL, DType, ProcessConfig, SharedOptions, check_least
from outrider.config.draft import (
    BUILT_IN_ALGORITHMS,
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    ONLINE_ALGORITHMS,
    Algorithm,
    DraftAttentionBackend,
    DraftConfig,
    DraftOptions,
)
from outrider.config.gateway import GatewayConfig, GatewayOptions, ReasoningParser, ToolCallParser
from outrider.config.serve import ServeConfig
from outrider.config.target import KVCacheDType, Quantization, SchedulePolicy, TargetConfig
from outrider.config.tls import ServiceTlsOptions
from outrider.config.train import TrainConfig

__all__ = [
    "AUTO_CORES",
    "BUILT_IN_ALGORITHMS",
    "DEFAULT_MODEL",
    "FED_ALGORITHMS",
    "MODEL_ALGORITHMS",
    "ONLINE_ALGORITHMS",
    "Algorithm",
    "DType",
    "DraftAttentionBackend",
    "DraftConfig",
    "DraftOptions",
    "GatewayConfig",
    "GatewayOptions",
    "KVCacheDType",
    "ProcessConfig",
    "Quantization",
    "ReasoningParser",
    "SchedulePolicy",
    "ServeConfig",
    "ServiceTlsOptions",
    "SharedOptions",
    "TargetConfig",
    "ToolCallParser",
    "TrainConfig",
    "check_least",
    "format_cores",
    "parse_cores",
    "plain_argv",
    "to_argv",
]
