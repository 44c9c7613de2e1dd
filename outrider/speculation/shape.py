"""The shape of explicit trees: three flags with SGLang's meaning, all set or none.

--speculative-num-steps S           levels of the tree
--speculative-eagle-topk K          expanded nodes per level, and children of each of them
--speculative-num-draft-tokens N    tokens verified per session and step: the root and the N - 1 best candidates
"""

from __future__ import annotations

from dataclasses import dataclass

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


def explicit_shape(steps: int | None, topk: int | None, rows: int | None) -> TreeShape | None:
    """The shape that the three flags set; None if none is set. A chain (topk 1) has steps + 1 tokens for any `rows`.

    Raises ConfigError if only some flags are set, or if the tree has fewer candidates than `rows` - 1.
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
    if shape.rows - 1 > shape.candidates:
        raise ConfigError(
            f"{_ROWS} {rows} counts the root and {rows - 1} nodes, but {_STEPS} {steps} and {_TOPK} {topk} give "
            f"{shape.candidates} to choose from"
        )
    return shape
