"""Other names of flags and values, replaced by ours before the parser reads them.

--sglang-FLAG                              slime's prefix; --FLAG
--mem-fraction                             an older name of --mem-fraction-static
--rollout-num-gpus-per-engine              slime's --tp-size
--speculative-draft-attention-backend      --draft-attention-backend
--attention-backend fa3                    the name of a kernel that does not exist here; auto
--speculative-algorithm eagle3             algorithms are written in upper case; an empty one is NONE
--self-draft VALUE                         an earlier flag: a source and a format of self-speculation
--dry-run                                  --dry-run text
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.config.compatibility.foreign_flags import (
    FOREIGN_FLAGS,
    FOREIGN_KERNELS,
    TARGET_KERNELS_ONLY,
    ForeignFlag,
)
from outrider.errors import ConfigError

PREFIX = "--sglang-"
ALIASES = {
    "--mem-fraction": "--mem-fraction-static",
    "--rollout-num-gpus-per-engine": "--tp-size",
    "--speculative-draft-attention-backend": "--draft-attention-backend",
}
_FOREIGN = {flag.name: flag for flag in FOREIGN_FLAGS}
_KERNELS = {
    "--attention-backend": FOREIGN_KERNELS,
    "--draft-attention-backend": FOREIGN_KERNELS + TARGET_KERNELS_ONLY,
}
# Source and format of self-speculation by the value of the earlier flag --self-draft.
_SELF_DRAFT = {
    "text": ("lookup", "auto"),
    "int4": ("quantized", "int4"),
    "int8": ("quantized", "int8"),
}


@dataclass
class Translation:
    """Arguments as the parser takes them. flags: the flags among them. notes: what has no effect, or another one."""

    argv: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Add a note, once."""
        if text not in self.notes:
            self.notes.append(text)


def translate(argv: Sequence[str]) -> Translation:
    """The same command in our own flags and values. Raises ConfigError for a foreign flag with a wrong value."""
    words = _Words(argv)
    made = Translation()
    for word in words:
        if not is_flag(word):
            made.argv.append(word)
            continue
        given, equals, value = word.partition("=")
        name = current_name(given)
        made.flags.append(given)
        if name in _FOREIGN:
            made.note(_foreign(_FOREIGN[name], given, value if equals else None, words))
            continue
        new = _value(given, name, value if equals else words.peek(), made)
        if new is None:
            made.argv.append(f"{name}={value}" if equals else name)
            continue
        made.argv += new
        if not equals:
            words.skip()
    return made


def is_flag(word: str) -> bool:
    """True for the name of a flag, with or without a value behind `=`."""
    return word.startswith("--") and word[2:3].isalpha()


def current_name(flag: str) -> str:
    """Our name of a flag, without an underscore."""
    name = flag.replace("_", "-")
    if name.startswith(PREFIX):
        name = f"--{name.removeprefix(PREFIX)}"
    return ALIASES.get(name, name)


class _Words:
    """An iterator over words that can look at the next one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self._next = 0

    def __iter__(self) -> Iterator[str]:
        while self._next < len(self._words):
            self._next += 1
            yield self._words[self._next - 1]

    def peek(self) -> str | None:
        """The next word; None if it is a flag, or if there is none."""
        word = self._words[self._next] if self._next < len(self._words) else None
        return None if word is None or is_flag(word) else word

    def skip(self) -> None:
        """Leave out the next word, if it is no flag."""
        if self.peek() is not None:
            self._next += 1


def _foreign(flag: ForeignFlag, given: str, value: str | None, words: _Words) -> str:
    """Read the words of a foreign flag. Returns its note."""
    taken = [] if value is None else [value]
    while (flag.words is None or len(taken) < flag.words) and (word := words.peek()) is not None:
        taken.append(word)
        words.skip()
    if flag.words != 0 and not taken:
        raise ConfigError(f"{given} needs a value")
    for word in taken:
        if flag.choices and word not in flag.choices:
            raise ConfigError(f"{given} {word} is not known; choose one of {', '.join(flag.choices)}")
    return flag.note(" ".join([given, *taken]))


def _value(given: str, name: str, value: str | None, made: Translation) -> list[str] | None:
    """The words for a flag whose value is written differently here; None if it stays as it is.

    given: the flag as it was written; name: our name of it
    """
    if name == "--speculative-algorithm" and value is not None:
        return [f"{name}={value.upper() or 'NONE'}"]
    if name == "--self-draft":
        return _self_draft(value)
    if name == "--dry-run" and value is None:
        return [f"{name}=text"]
    if value in _KERNELS.get(name, ()):
        made.note(
            f"{given} {value} names kernels that this service does not have; it uses its own fastest ones ({name} auto)"
        )
        return [f"{name}=auto"]
    return None


def _self_draft(value: str | None) -> list[str]:
    if value is None:
        return ["--self-speculation"]
    source, number_format = _SELF_DRAFT.get(value, (value, "auto"))
    return [f"--self-speculation={source}", f"--self-speculation-format={number_format}"]
