"""The parser of flags, and the two help pages of a process.

`--help` shows the flags that most users need, `--help-all` every flag by topic. `tyro` writes both pages, from views of
a configuration: a class that declares flags has their topic in `topic`, a configuration has the names of its most used
flags in `common`. Command lines of other engines are translated first (outrider/config/compatibility).
"""

from __future__ import annotations

import ast
import difflib
import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from itertools import pairwise
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from outrider.config.compatibility.foreign_flags import FOREIGN_FLAGS
from outrider.config.compatibility.spellings import ALIASES, Translation, current_name, translate
from outrider.errors import ConfigError
from outrider.telemetry import setup_logging, write_line

log = logging.getLogger(__name__)

Config = TypeVar("Config")
Field = tuple[str, Any, Any]  # name, type and default, as make_dataclass takes them

# Order of the groups of `--help-all`.
TOPICS = (
    "Ray",
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
    "replicas",
    "cores",
    "observability",
)


def parse_flags(config: type[Config], argv: Sequence[str], prog: str) -> Config:
    """The configuration of a process. Shows a help page, or what is wrong with a flag, and raises SystemExit.

    Logs a warning for each flag that has no effect, or another one than elsewhere.

    prog: the command, such as "outrider serve"
    """
    parsed, notes = read_flags(config, argv, prog)
    if notes:
        style: Any = parsed  # every configuration has the flags of log lines
        setup_logging(prog.rpartition(" ")[2], style.log_level, style.log_format)
    for note in notes:
        log.warning("%s", note)
    return parsed


def read_flags(config: type[Config], argv: Sequence[str], prog: str) -> tuple[Config, list[str]]:
    """As `parse_flags`, with the warnings in place of logging them."""
    if "--help-all" in argv:
        tyro.cli(_by_topic(config), prog=prog, args=["--help"], description=config.__doc__)
    if "--help" in argv or "-h" in argv:
        tyro.cli(_most_used(config), prog=prog, args=["--help"], description=config.__doc__)
    try:
        translation = translate(argv)
        _check_known(config, translation, prog)
    except ConfigError as error:
        write_line(f"{prog}: error: {error.message}")
        raise SystemExit(2) from None
    return tyro.cli(config, prog=prog, args=translation.argv), translation.notes


def _check_known(config: type, translation: Translation, prog: str) -> None:
    """Raise ConfigError for a flag that the configuration does not have, with the nearest one that it has."""
    known = {spelling for cls in flag_classes(config) for flag in _spellings(cls) for spelling in flag}
    others = [name for name, ours in ALIASES.items() if ours in known] + [flag.name for flag in FOREIGN_FLAGS]
    for given in translation.flags:
        name = current_name(given)
        if name in known or name in others or name == "--self-draft":
            continue
        (nearest,) = difflib.get_close_matches(name, [*known, *others], n=1, cutoff=0.0)
        raise ConfigError(f"there is no flag {given}; the nearest one is {nearest}; `{prog} --help-all` shows all")


def _spellings(cls: type) -> Iterator[list[str]]:
    """The spellings of each flag that a class declares."""
    types = get_type_hints(cls, include_extras=True)
    for flag in fields(cls):
        name = flag.name.replace("_", "-")
        hint = types[flag.name]
        aliases = [
            alias for part in getattr(hint, "__metadata__", ()) for alias in getattr(part, "aliases", None) or ()
        ]
        opposite = [f"--no-{name}"] if isinstance(flag.default, bool) else []
        yield [f"--{name}", *aliases, *opposite]


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
    groups: dict[str, list[Field]] = {topic: [] for topic in TOPICS}
    for cls in flag_classes(config):
        groups[cls.topic] += _flags_of(cls)  # type: ignore[attr-defined]
    views = []
    for number, (topic, flags) in enumerate(groups.items()):
        if flags:
            view = make_dataclass(f"Topic{number}", flags, frozen=True)
            title = tyro.conf.arg(name=topic)
            group = Annotated[view, tyro.conf.OmitArgPrefixes, title]  # type: ignore[valid-type]
            views.append((f"topic{number}", group, field(default_factory=view)))
    return make_dataclass("AllFlags", views, frozen=True)


def _most_used(config: type) -> type:
    """A view with the most used flags, and `--help-all`."""
    flags = {flag[0]: flag for cls in flag_classes(config) for flag in _flags_of(cls)}
    text = tyro.conf.arg(help=f"show all {len(flags)} flags, by topic, and exit", help_behavior_hint="")
    pointer = ("help_all", Annotated[bool, tyro.conf.FlagCreatePairsOff, text], False)
    common: tuple[str, ...] = config.common  # type: ignore[attr-defined]
    return make_dataclass("MostUsedFlags", [*(flags[name] for name in common), pointer], frozen=True)


def _flags_of(cls: type) -> list[Field]:
    """The fields of a class that declares flags, with their docstrings as help texts of one paragraph."""
    types = get_type_hints(cls, include_extras=True)
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {
        declared.target.id: " ".join(text.value.value.split())
        for declared, text in pairwise(definition.body)
        if isinstance(declared, ast.AnnAssign) and isinstance(declared.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }
    return [
        (flag.name, Annotated[types[flag.name], tyro.conf.arg(help=texts[flag.name])], flag.default)
        for flag in fields(cls)
    ]
