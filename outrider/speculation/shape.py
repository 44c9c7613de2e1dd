"""The shape of explicit trees: three flags with SGLang's meaning, all set or none.

--speculative-num-steps S           levels of the tree
--speculative-eagle-topk K          expanded nodes per level, and children of each of them
--speculative-num-draft-tokens N    tokens verified per session and step: the root and the N - 1 best candidates
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.errors import ConfigError

_STEPS, _TOPK, _ROWS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"


@dataclass(frozen=True)
class TreeShape:
    """An explicit tree. steps: levels; topk: breadth; rows: verified tokens, the root included."""

    steps: int
    topk: int
    rows: int

    @property
    def candidates(self) -> int:
        """Number of candidate nodes, of which the best are verified."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def expansions(self) -> int:
        """Number of expanded nodes, without the root."""
        return (self.steps - 1) * self.topk

    def flags(self) -> dict[str, int]:
        """The three flags, by the names of configuration fields."""
        return {
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.rows,
        }

    def note(self, asked: int) -> str:
        """The log line where the tree has other tokens than asked for."""
        if self.topk == 1:
            why = f"a chain of {self.steps} steps has {self.rows} tokens, the root included"
        else:
            why = f"{_STEPS} {self.steps} and {_TOPK} {self.topk} give {self.candidates} nodes below the root"
        return f"{_ROWS} {asked} becomes {self.rows}: {why}"


def explicit_shape(steps: int | None, topk: int | None, rows: int | None) -> TreeShape | None:
    """The shape that the three flags set; None if none is set.

    A chain (topk 1) has steps + 1 tokens for any `rows`; another tree has at most its candidates and the root. Raises
    ConfigError if only some flags are set, or for numbers that are too small.
    """
    flags = {_STEPS: steps, _TOPK: topk, _ROWS: rows}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise ConfigError(
            f"{' and '.join(sorted(flags.keys() - set(missing)))} fix the tree together with {' and '.join(missing)}; "
            "set all three, or none for adaptive trees"
        )
    assert steps is not None
    assert topk is not None
    assert rows is not None
    for flag, value, least in ((_STEPS, steps, 1), (_TOPK, topk, 1), (_ROWS, rows, 2)):
        if value < least:
            raise ConfigError(f"{flag} must be {least} or more, not {value}")
    shape = TreeShape(steps, topk, steps + 1 if topk == 1 else rows)
    return replace(shape, rows=min(shape.rows, shape.candidates + 1))
