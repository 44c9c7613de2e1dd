"""What values of benchmarks' flags may be, and what is said of others."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.harness.prompts import Prompt, read_prompts


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def whole(text: str) -> int:
    """A whole number of one or more. Raises ArgumentTypeError."""
    return _integer(text, 1)


def seed(text: str) -> int:
    """A whole number of zero or more. Raises ArgumentTypeError."""
    return _integer(text, 0)


def wholes(text: str, between: str, count: int) -> tuple[int, ...]:
    """So many whole numbers of one or more, with something between them. Raises ArgumentTypeError."""
    words = text.split(between)
    if len(words) != count:
        raise argparse.ArgumentTypeError(f"{text!r} is not {count} whole numbers with {between} between them")
    return tuple(whole(word) for word in words)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None


def positive(text: str) -> float:
    """A number above zero, perhaps inf. Raises ArgumentTypeError."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def share(text: str) -> float:
    """A number in [0, 1). Raises ArgumentTypeError."""
    value = _number(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in [0, 1)")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ArgumentTypeError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is no JSON object")
    return value


def address(text: str) -> str:
    """An address of a server. Raises ArgumentTypeError."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text} begins with neither http:// nor https://")
    return text


def prompts_in(parser: argparse.ArgumentParser, file: Path) -> list[Prompt]:
    """The prompts of a file that a flag names. Ends the program where it has none."""
    try:
        found = read_prompts(file)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"there are no prompts in {file}")
    return found
