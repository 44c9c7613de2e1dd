"""Flags of the processes, as frozen dataclasses that each process parses once, at its start.

A class declares the flags of one topic (`ModelOptions`, `NgramOptions`, ...). `TargetOptions`, `DraftOptions` and
`GatewayOptions` gather the flags of one service; `TargetConfig`, `DraftConfig` and `GatewayConfig` add those that
depend on where the process runs; `ServeConfig` takes every option once for all three.

Flags that SGLang has keep SGLang's names and meaning. A field's docstring is the flag's help text.
"""

from outrider.config.access.tls import ServiceTlsOptions
from outrider.config.access.token import ServiceTokenOptions
from outrider.config.argv import format_cores, parse_cores, to_argv
from outrider.config.common import (
    AUTO_CORES,
    DEFAULT_MODEL,
    DType,
    ProcessConfig,
    SharedOptions,
    check_minimum,
    flag_of,
)
from outrider.config.draft import (
    BUILT_IN_ALGORITHMS,
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    ONLINE_ALGORITHMS,
    Algorithm,
    DraftAttentionBackend,
    DraftConfig,
    DrafterOptions,
    DraftOptions,
    LoadFormat,
)
from outrider.config.flags import flag_classes, parse_flags, read_flags
from outrider.config.gateway import GatewayConfig, GatewayOptions, ReasoningParser, StreamTransport, ToolCallParser
from outrider.config.ray import RayDownConfig, RayStatusConfig, RayUpConfig
from outrider.config.serve import DoctorConfig, DoctorOptions, ServeConfig
from outrider.config.target import (
    KVCacheDType,
    Quantization,
    SchedulePolicy,
    TargetConfig,
    TargetOptions,
    check_device,
)
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
    "DoctorConfig",
    "DoctorOptions",
    "DraftAttentionBackend",
    "DraftConfig",
    "DraftOptions",
    "DrafterOptions",
    "GatewayConfig",
    "GatewayOptions",
    "KVCacheDType",
    "LoadFormat",
    "ProcessConfig",
    "Quantization",
    "RayDownConfig",
    "RayStatusConfig",
    "RayUpConfig",
    "ReasoningParser",
    "SchedulePolicy",
    "ServeConfig",
    "ServiceTlsOptions",
    "ServiceTokenOptions",
    "SharedOptions",
    "StreamTransport",
    "TargetConfig",
    "TargetOptions",
    "ToolCallParser",
    "TrainConfig",
    "check_device",
    "check_minimum",
    "flag_classes",
    "flag_of",
    "format_cores",
    "parse_cores",
    "parse_flags",
    "read_flags",
    "to_argv",
]
