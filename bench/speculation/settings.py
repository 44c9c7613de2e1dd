"""Settings of speculation that are compared: drafters, each with trees that adapt and with explicit ones."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError
from outrider.speculation.shape import explicit_shape

Kind = Literal["plain", "adaptive", "fixed"]

_BESIDE = "+NGRAM"
_TREE = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


@dataclass(frozen=True)
class Setting:
    """Flags of `outrider serve`. drafter: whose trees they shape; settings of one drafter are compared."""

    name: str
    drafter: str
    flags: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """What the flags leave to the system: nothing, as there is no drafter; the tree; or no part of it."""
        if self == PLAIN:
            return "plain"
        return "fixed" if any(flag.partition("=")[0] in _TREE for flag in self.flags) else "adaptive"


PLAIN = Setting("plain", "none", ("--speculative-algorithm", "NONE"))


def named(text: str) -> Setting:
    """A setting of the command line, NAME=FLAGS. Raises ValueError."""
    name, equals, flags = text.partition("=")
    if not (name and equals and flags):
        raise ValueError(f"{text!r} is not NAME=FLAGS")
    return Setting(name, name, tuple(shlex.split(flags)))


def grid(
    drafters: Iterable[str], steps: Sequence[int], topk: Sequence[int], rows: Sequence[int], draft: str | None
) -> list[Setting]:
    """Every drafter as it is, and with every explicit tree that makes sense.

    drafters: algorithms; with "+NGRAM" behind it, one has the n-gram drafter beside it
    rows: --speculative-num-draft-tokens. NGRAM has this one flag alone; chains have as many as they are deep, and one
    draft: --speculative-draft-model-path of drafters with a model, if one is named
    """
    found = []
    for drafter in drafters:
        algorithm = drafter.removesuffix(_BESIDE)
        flags: tuple[str, ...] = ("--speculative-algorithm", algorithm)
        if draft is not None and algorithm != "NGRAM":
            flags += ("--speculative-draft-model-path", draft)
        if drafter.endswith(_BESIDE):
            flags += ("--speculative-ngram-beside",)
        found.append(Setting(f"{drafter}, adaptive", drafter, flags))
        if algorithm == "NGRAM":
            found += [Setting(f"{drafter}, {n} rows", drafter, (*flags, _TREE[2], str(n))) for n in rows]
            continue
        for shape in shapes(steps, topk, rows):
            words = [word for flag, value in zip(_TREE, shape, strict=True) for word in (flag, str(value))]
            found.append(Setting(f"{drafter}, {'x'.join(map(str, shape))}", drafter, (*flags, *words)))
    return found


def shapes(steps: Sequence[int], topk: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int, int]]:
    """Steps, topk and rows of the explicit trees that there can be and that can be as deep as they have steps."""
    found = []
    for s, k, asked in itertools.product(steps, topk, rows):
        n = s + 1 if k == 1 else asked
        try:
            explicit_shape(s, k, n)
        except ConfigError:
            continue
        if n > s:
            found.append((s, k, n))
    return list(dict.fromkeys(found))
