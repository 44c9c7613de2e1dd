"""The parser of flags, and the two help pages of a process.

`--help` shows the flags that most users need, `--help-all` every flag by topic. Both pages are `tyro`'s own, made from
views of a configuration: its base classes that declare flags name their topic (`topic`), the configuration names its
most used flags (`common`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from outrider.config.argv import current_spelling

Config = TypeVar("Config")

# Order of the groups of `--help-all`.
TOPICS = (
    "model",
    "training data",
    "optimization",
    "speculation",
    "self-speculation",
    "draft model",
    "NGRAM drafter",
    "online learning",
    "evaluation",
    "KV cache and memory",
    "scheduling",
    "kernels",
    "network",
    "security",
    "request limits",
    "load balancing",
    "API",
    "cores",
    "observability",
)


def parse_flags(config: type[Config], argv: Sequence[str], prog: str) -> Config:
    """The configuration of a process. Shows a help page, or what is wrong with a flag, and raises SystemExit.

    prog: the command, such as "outrider serve"
    """
    args = current_spelling(argv)
    if "--help-all" in args:
        tyro.cli(_by_topic(config), prog=prog, args=["--help"], description=config.__doc__)
    if "--help" in args or "-h" in args:
        tyro.cli(_most_used(config), prog=prog, args=["--help"], description=config.__doc__)
    return tyro.cli(config, prog=prog, args=args)


def flag_classes(config: type) -> Iterator[type]:
    """The classes that declare a configuration's flags, those of nested configurations included."""
    for cls in reversed(config.__mro__):
        if "topic" in vars(cls):
            yield cls
    for part in fields(config):
        if isinstance(part.default_factory, type) and is_dataclass(part.default_factory):
            yield from flag_classes(part.default_factory)


def _by_topic(config: type) -> type:
    """A view with a group of flags for each topic."""
    groups: dict[str, list[type]] = {topic: [] for topic in TOPICS}
    for cls in flag_classes(config):
        groups[cls.topic].append(cls)  # type: ignore[attr-defined]
    views = []
    for number, (topic, classes) in enumerate(groups.items()):
        if classes:
            view = make_dataclass(f"Topic{number}", [], bases=tuple(reversed(classes)), frozen=True)
            views.append((f"topic{number}", _group(view, topic), field(default_factory=view)))
    return make_dataclass("AllFlags", views, frozen=True)


def _group(view: type, title: str) -> Any:
    """The type of a field whose flags stand below a title, and have no prefix."""
    return Annotated[view, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title)]


def _most_used(config: type) -> type:
    """A view with the most used flags alone: the others are hidden."""
    common: tuple[str, ...] = config.common  # type: ignore[attr-defined]
    classes = [cls for cls in flag_classes(config) if set(common) & {flag.name for flag in fields(cls)}]
    classes.sort(key=lambda cls: min(common.index(flag.name) for flag in fields(cls) if flag.name in common))
    hidden = []
    for cls in classes:
        types = get_type_hints(cls, include_extras=True)
        hidden += [
            (flag.name, Annotated[types[flag.name], tyro.conf.Suppress], flag.default)
            for flag in fields(cls)
            if flag.name not in common
        ]
    number = sum(len(fields(cls)) for cls in flag_classes(config))
    return make_dataclass("MostUsedFlags", [*hidden, _pointer(number)], bases=tuple(reversed(classes)), frozen=True)


def _pointer(number: int) -> tuple[str, Any, bool]:
    """The flag `--help-all`, as a field of a help page. number: of all flags."""
    text = tyro.conf.arg(help=f"show all {number} flags, by topic, and exit", help_behavior_hint="")
    return ("help_all", Annotated[bool, tyro.conf.FlagCreatePairsOff, text], False)
