"""The file of --models: a table for each model, with the flags of that model.

[qwen3-8b]                                  # its name in requests
target = ["gpu1:30010", "gpu2:30010"]
draft = "dns:qwen-drafts:30020"

["meta-llama/Llama-3.1-8B-Instruct"]
served-model-name = "llama"                 # another name
target = "file:/etc/outrider/llama"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from gateway.pools.addresses import parse
from outrider.config import GatewayConfig, flag_of
from outrider.errors import ConfigError

# Flags that a table may have; those of the command line hold for the models whose tables have none.
_FLAGS = frozenset({
    "target", "draft", "draft_report", "served_model_name", "model_path", "tool_call_parser", "reasoning_parser",
    "sampling_defaults", "per_request_spec_decode_metrics", "request_timeout", "cache_threshold",
    "balance_abs_threshold", "balance_rel_threshold", "discovery_interval", "stream_transport", "service_token_file",
    "service_ssl_ca_certs", "service_ssl_certfile", "service_ssl_keyfile", "service_ssl_server_name",
})  # fmt: skip
# Flags of the command line that belong into tables.
_OF_TABLES = ("target", "draft", "draft_report", "served_model_name", "model_path")


def model_configs(config: GatewayConfig) -> list[GatewayConfig]:
    """The configuration of each model, the default one first. Raises ConfigError."""
    if config.models is None:
        return [config]
    for name in _OF_TABLES:
        if getattr(config, name) not in ((), None, getattr(GatewayConfig, name)):
            raise ConfigError(f"{flag_of(name)} is for one model; with --models, write it into the model's table")
    if config.require_draft:
        raise ConfigError("--require-draft would end all models for the draft of one; leave it out with --models")
    tables = _tables(config.models)
    found = [_of_table(config, name, table) for name, table in tables.items()]
    names: set[str] = set()
    for name in (name for one in found for name in one.served_model_name):
        if name in names or name in ("", "default"):
            reason = "is the name of two models" if name in names else "is what requests write for the first model"
            raise ConfigError(f"{config.models}: {name!r} {reason}; choose another name")
        names.add(name)
    return found


def _tables(path: str) -> Mapping[str, Any]:
    try:
        with Path(path).expanduser().open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"--models: {path} cannot be read: {reason}") from None
    if not tables:
        raise ConfigError(f"--models: {path} has no model; write a table for each, such as [qwen3-8b]")
    return tables


def _of_table(config: GatewayConfig, name: str, table: Any) -> GatewayConfig:
    where = f"{config.models}: [{name}]"
    if isinstance(table, list) and any(isinstance(one, Mapping) for one in table):
        raise ConfigError(f"{config.models}: [[{name}]] is a list of tables; write [{name}]")
    if not isinstance(table, Mapping):
        raise ConfigError(f"{config.models}: `{name}` stands before the first table; write it into that of a model")
    for key, value in table.items():
        if isinstance(value, Mapping):
            raise ConfigError(f'{where} has a table {key!r}; a name with a dot needs quotes: ["{name}.{key}"]')
    given = {key.replace("-", "_"): value for key, value in table.items()}
    if len(given) < len(table):
        raise ConfigError(f"{where} has an entry twice, with - and with _; leave one of them out")
    for key in given:
        if key not in _FLAGS:
            flags = ", ".join(sorted(flag.replace("_", "-") for flag in _FLAGS))
            raise ConfigError(f"{where} has {key.replace('_', '-')!r}, which is no flag of a model; those are {flags}")
    types = get_type_hints(GatewayConfig)
    values = {key: _value(types[key], value, f"{where} {key.replace('_', '-')}") for key, value in given.items()}
    others = values.pop("served_model_name", ())
    names = tuple(dict.fromkeys((name, *others)))
    found = replace(config, **({"target": (), "draft": ()} | values), served_model_name=names)
    try:
        found.check_model()
        for address in (*found.target, *found.draft):
            parse(address)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return found


def _value(kind: Any, value: Any, where: str) -> Any:
    """The value of a flag; one text may stand for a list of one. Raises ConfigError."""
    if get_origin(kind) is tuple and isinstance(value, str):
        value = [value]
    try:
        return TypeAdapter(kind).validate_python(value, strict=get_origin(kind) is not tuple)
    except ValidationError as error:
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        known = f"; choose one of {', '.join(map(str, choices))}" if choices else ""
        raise ConfigError(f"{where}: {value!r} is no value of this flag{known} ({error.errors()[0]['msg']})") from None
