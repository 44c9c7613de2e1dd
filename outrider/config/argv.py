"""Configurations as arguments, and lists of CPU cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from outrider.config.common import ProcessConfig, flag_of
from outrider.errors import ConfigError


def parse_cores(text: str) -> list[int]:
    """Core numbers of a list such as "0-3,6". Raises ConfigError."""
    try:
        cores: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
        if not cores:
            raise ValueError("an empty range")
    except ValueError:
        raise ConfigError(f'"{text}" is no list of cores; write for example 0-3,6') from None
    return sorted(set(cores))


def format_cores(cores: Sequence[int]) -> str:
    """Core numbers as a list that `parse_cores` reads."""
    return ",".join(map(str, cores))


def to_argv(config: ProcessConfig) -> list[str]:
    """Flags that make this configuration: the fields that differ from their defaults.

    Only the first of several values of a field may begin with a dash, as on a command line.
    """
    argv: list[str] = []
    for field in fields(config):
        value: Any = getattr(config, field.name)
        if value == field.default:
            continue
        flag = flag_of(field.name)
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            several = isinstance(value, Sequence) and not isinstance(value, str)
            words = [str(one) for one in value] if several else [str(value)]
            if words and words[0].startswith("-"):  # the parser would take the word for a flag
                argv.append(f"{flag}={words.pop(0)}")
            else:
                argv.append(flag)
            argv += words
    return argv
