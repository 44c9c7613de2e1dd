"""Writes docs/flags.md from the configuration dataclasses of `outrider.config`: `make flags`.

A heading for each topic, and a table for each class of options: the flag, its values, its default, and the docstring of
its field.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import typing
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from outrider.config import (
    DoctorOptions,
    DraftConfig,
    GatewayConfig,
    RayDownConfig,
    RayStatusConfig,
    RayUpConfig,
    ServeConfig,
    TargetConfig,
    TrainConfig,
)
from outrider.config.compatibility.foreign_flags import FOREIGN_FLAGS, FOREIGN_KERNELS, ForeignFlag
from outrider.config.compatibility.spellings import ALIASES, PREFIX

PAGE = Path(__file__).with_name("flags.md")
COMMANDS = {
    "serve": ServeConfig,
    "target": TargetConfig,
    "draft": DraftConfig,
    "gateway": GatewayConfig,
    "train": TrainConfig,
    "doctor": DoctorOptions,
    "ray up": RayUpConfig,
    "ray status": RayStatusConfig,
    "ray down": RayDownConfig,
}
HEAD = """\
# Flags

`make flags` writes this page from the configuration classes in `outrider/config/`; edit the field docstrings there.

`outrider serve` takes the flags of all three processes and hands each to the process it belongs to; `outrider doctor`
takes the same. A flag of several values takes them separated by spaces. An on/off flag `--x` has an opposite, `--no-x`.
Flags that SGLang has too keep SGLang's names and meaning; [flags of other engines](#flags-of-other-engines) without a
meaning here are accepted. An unknown flag is refused with the nearest known one. Exit code 2 means wrong flags or
configuration.

Environment variables: `OUTRIDER_CACHE` is the folder of converted models (default `~/.cache/outrider`).
`OUTRIDER_API_KEY` and `OUTRIDER_ADMIN_API_KEY` hold API keys separated by spaces, `OUTRIDER_SERVICE_TOKEN` the token
that targets and drafts require of their callers. `OUTRIDER_VECTORS=avx2` selects the AVX2 kernels on a processor that
has AVX-512 too, and on ARM `neon` those without dot products of bfloat16. `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE`
have their usual meaning for the Hugging Face hub.
"""
FOREIGN = """\

## Flags of other engines

Command lines of SGLang, SGL-JAX and slime are accepted as they stand
([command lines](tuning.md#command-lines-from-sglang-sgl-jax-and-slime)). For each flag of this table that is used, the
process logs a warning. Of `outrider serve`, `outrider target`, `outrider draft`, `outrider gateway`, `outrider train`.

| flag | values | no effect, because |
| --- | --- | --- |
{flags}

| written | read as |
| --- | --- |
{spellings}
"""
NAMES = {str: "text", int: "number", float: "number", type(None): ""}


def page() -> str:
    """The whole page."""
    sections: dict[type, list[Field[Any]]] = {}
    taken_by: dict[type, list[str]] = {}
    for command, config in COMMANDS.items():
        for owner, field in options(config):
            known = sections.setdefault(owner, [])
            if all(field.name != other.name for other in known):
                known.append(field)
            if command not in taken_by.setdefault(owner, []):
                taken_by[owner].append(command)
    by_topic: dict[str, list[type]] = {}
    for owner in sections:
        by_topic.setdefault(topic(owner), []).append(owner)
    parts = [HEAD]
    for title, owners in by_topic.items():
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n")
        parts += (table(owner, sections[owner], taken_by[owner]) for owner in owners)
    return "".join([*parts, foreign()])


def foreign() -> str:
    """The flags of other engines, and other spellings of ours."""
    flags = [f"| `{flag.name}` | {foreign_values(flag)} | {flag.reason} |" for flag in FOREIGN_FLAGS]
    spellings = [f"| `{PREFIX}FLAG` | `--FLAG` |", *(f"| `{old}` | `{new}` |" for old, new in ALIASES.items())]
    kernels = ", ".join(f"`{name}`" for name in FOREIGN_KERNELS)
    spellings.append(f"| `--attention-backend`, `--draft-attention-backend` with {kernels} | `auto`, with a warning |")
    spellings.append("| `--draft-attention-backend` with `triton`, `torch_native`, `native` | `auto`, with a warning |")
    return FOREIGN.format(flags="\n".join(flags), spellings="\n".join(spellings))


def foreign_values(flag: ForeignFlag) -> str:
    """What a flag of another engine takes."""
    if flag.choices:
        return ", ".join(f"`{choice}`" for choice in flag.choices)
    return {0: "on/off", 1: "text", None: "numbers"}[flag.words]


def options(config: type) -> Iterator[tuple[type, Field[Any]]]:
    """Each flag of a configuration class, with the class that declares it; groups of options are opened."""
    hints = typing.get_type_hints(config)
    for field in fields(config):
        if is_dataclass(hints[field.name]):
            yield from options(hints[field.name])
        else:
            yield owner_of(config, field.name), field


def owner_of(config: type, name: str) -> type:
    """The class that declares a field: the first one in the order of inheritance."""
    return next(owner for owner in config.__mro__ if name in inspect.get_annotations(owner))


def topic(owner: type) -> str:
    """The topic that a class declares, else its docstring."""
    return str(vars(owner).get("topic") or first_sentence(owner))


def first_sentence(owner: type) -> str:
    """The first paragraph of a class's docstring, without the full stop."""
    return " ".join((inspect.getdoc(owner) or owner.__name__).split("\n\n")[0].split()).rstrip(".")


def table(owner: type, found: list[Field[Any]], commands: list[str]) -> str:
    """A table of one class's flags."""
    docs = docstrings(owner)
    hints = typing.get_type_hints(owner, include_extras=True)
    taken_by = ", ".join(f"`outrider {command}`" for command in commands)
    lines = ["", f"{first_sentence(owner)}. Of {taken_by}.", ""]
    lines += ["| flag | values | default | meaning |", "| --- | --- | --- | --- |"]
    for field in found:
        cells = (flag(field.name, hints[field.name]), values(hints[field.name]), default(field), docs[field.name])
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def docstrings(owner: type) -> dict[str, str]:
    """The text below each field of a class, as one line."""
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(owner)))
    body = typing.cast(ast.ClassDef, tree.body[0]).body
    found = {}
    for declaration, text in itertools.pairwise(body):
        match declaration, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = " ".join(words.split())
    return found


def flag(name: str, hint: Any) -> str:
    """A flag and its other spellings, as code."""
    more = [alias for part in getattr(hint, "__metadata__", ()) for alias in getattr(part, "aliases", None) or ()]
    return ", ".join(f"`{spelling}`" for spelling in ["--" + name.replace("_", "-"), *more])


def values(hint: Any) -> str:
    """What a flag takes, in words or as a list of choices."""
    if hasattr(hint, "__metadata__"):
        hint = hint.__origin__
    if hint is bool:
        return "on/off"
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        inner = values(get_args(hint)[0])
        return f"several of {inner}" if inner.startswith("`") else f"{inner}s".replace("texts", "several texts")
    if get_args(hint):  # a union with None
        return values(next(part for part in get_args(hint) if part is not type(None)))
    return NAMES[hint]


def default(field: Field[Any]) -> str:
    """A flag's default, as code; nothing where the flag is unset."""
    if field.default is MISSING or field.default is None or field.default == ():
        return ""
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    if isinstance(field.default, tuple):
        return "`" + " ".join(map(str, field.default)) + "`"
    return f"`{field.default}`"


if __name__ == "__main__":
    PAGE.write_text(page())
