"""The shape of explicit trees: three flags of SGLang, with its meaning, set together or not at all.

--speculative-num-steps S           levels of the tree
--speculative-eagle-topk K          nodes of a level that are expanded, and children that each of them is given
--speculative-num-draft-tokens N    rows verified a session and step: the root and the N - 1 best of all candidates
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import ConfigError

_STEPS, _TOPK, _ROWS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"


@dataclass(frozen=True)
class TreeShape:
    """An explicit tree. steps: levels; topk: breadth; rows: verified, the root included."""

    steps: int
    topk: int
    rows: int

    @property
    def candidates(self) -> int:
        """Nodes that the best are chosen among."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def expansions(self) -> int:
        """Nodes that are expanded, the root aside."""
        return (self.steps - 1) * self.topk

    def flags(self) -> dict[str, int]:
        """The three flags, as configurations name them."""
        return {
            "speculative_num_steps": self.steps,
            "speculative_eagle_topk": self.topk,
            "speculative_num_draft_tokens": self.rows,
        }


def explicit_shape(steps: int | None, topk: int | None, rows: int | None) -> TreeShape | None:
    """The shape that the three flags name; None if none is set. A chain has as many rows as it needs, whatever is said.

    Raises ConfigError if some are set and others not, or the tree cannot have so many nodes.
    """
    flags = {_STEPS: steps, _TOPK: topk, _ROWS: rows}
    missing = [flag for flag, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return None
    if missing:
        raise ConfigError(
            f"{' and '.join(sorted(flags.keys() - set(missing)))} fix the tree together with {' and '.join(missing)}; "
            "set all three, or none for trees that adapt"
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
