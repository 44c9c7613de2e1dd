"""Types of command-line flags for argparse. Each raises ArgumentTypeError for a value out of its range."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from bench.harness.prompts import Prompt, read_prompts


def _int_of_at_least(text: str, minimum: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is less than {minimum}")
    return value


def positive_int(text: str) -> int:
    """An integer of at least 1."""
    return _int_of_at_least(text, 1)


def non_negative_int(text: str) -> int:
    """An integer of at least 0."""
    return _int_of_at_least(text, 0)


def positive_ints(text: str, separator: str, count: int) -> tuple[int, ...]:
    """`count` integers of at least 1, separated by `separator`."""
    words = text.split(separator)
    if len(words) != count:
        raise argparse.ArgumentTypeError(f"{text!r} is not {count} whole numbers with {separator} between them")
    return tuple(positive_int(word) for word in words)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def positive_float(text: str) -> float:
    """A number above 0; inf is allowed."""
    value = _float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    value = _float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in [0, 1)")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


def server_url(text: str) -> str:
    """The URL of an HTTP server."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} starts with neither http:// nor https://")
    return text


def drafter_argument(text: str) -> tuple[str, tuple[str, ...]]:
    """A drafter on the command line, NAME=FLAGS. Raises ArgumentTypeError."""
    name, equals, flags = text.partition("=")
    if not (name and equals and flags):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FLAGS")
    return name, tuple(shlex.split(flags))


def load_prompts(parser: argparse.ArgumentParser, file: Path) -> list[Prompt]:
    """The prompts of the file given by a flag. Exits with a usage error if the file has no prompts."""
    try:
        found = read_prompts(file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"there are no prompts in {file}")
    return found
