"""Settings of speculation: drafters, each with adaptive and with explicit trees."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.errors import ConfigError
from outrider.speculation.shape import explicit_shape

Kind = Literal["plain", "adaptive", "fixed"]

_WITH_NGRAM = "+NGRAM"
_TREE_FLAGS = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


@dataclass(frozen=True)
class Setting:
    """Flags of `outrider serve`. drafter: its name; tree shapes are compared among settings of one drafter."""

    name: str
    drafter: str
    flags: tuple[str, ...]

    @property
    def kind(self) -> Kind:
        """plain: no drafter; adaptive: the system chooses the trees; fixed: the flags set an explicit tree."""
        if self == PLAIN:
            return "plain"
        return "fixed" if any(flag.partition("=")[0] in _TREE_FLAGS for flag in self.flags) else "adaptive"


PLAIN = Setting("plain", "none", ("--speculative-algorithm", "NONE"))


def named(text: str) -> Setting:
    """A setting on the command line, NAME=FLAGS. Raises ValueError."""
    name, equals, flags = text.partition("=")
    if not (name and equals and flags):
        raise ValueError(f"{text!r} is not NAME=FLAGS")
    return Setting(name, name, tuple(shlex.split(flags)))


def grid(
    drafters: Iterable[str], steps: Sequence[int], topk: Sequence[int], tokens: Sequence[int], draft: str | None
) -> list[Setting]:
    """Each drafter with adaptive trees, and with each valid explicit tree.

    drafters: algorithms; the suffix "+NGRAM" adds the n-gram drafter
    tokens: values of --speculative-num-draft-tokens, the only tree flag of NGRAM; a chain has its depth + 1
    draft: --speculative-draft-model-path of drafters with a model, or None
    """
    found = []
    for drafter in drafters:
        algorithm = drafter.removesuffix(_WITH_NGRAM)
        flags: tuple[str, ...] = ("--speculative-algorithm", algorithm)
        if draft is not None and algorithm != "NGRAM":
            flags += ("--speculative-draft-model-path", draft)
        if drafter.endswith(_WITH_NGRAM):
            flags += ("--speculative-ngram-beside",)
        found.append(Setting(f"{drafter}, adaptive", drafter, flags))
        if algorithm == "NGRAM":
            found += [Setting(f"{drafter}, {n} tokens", drafter, (*flags, _TREE_FLAGS[2], str(n))) for n in tokens]
            continue
        for shape in shapes(steps, topk, tokens):
            words = [word for flag, value in zip(_TREE_FLAGS, shape, strict=True) for word in (flag, str(value))]
            found.append(Setting(f"{drafter}, {'x'.join(map(str, shape))}", drafter, (*flags, *words)))
    return found


def shapes(steps: Sequence[int], topk: Sequence[int], tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Steps, topk and tokens of valid explicit trees whose tokens suffice for a path of full depth."""
    found = []
    for s, k, count in itertools.product(steps, topk, tokens):
        n = s + 1 if k == 1 else count
        try:
            shape = explicit_shape(s, k, n)
        except ConfigError:
            continue
        if n > s and shape is not None and shape.rows == n:
            found.append((s, k, n))
    return list(dict.fromkeys(found))
