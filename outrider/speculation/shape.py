"""The shape of explicit trees: flags with SGLang's meaning. Three are set together or not at all.

--speculative-num-steps S           levels of the tree
--speculative-eagle-topk K          expanded nodes per level, and children of each of them
--speculative-num-draft-tokens N    tokens verified per session and step: the root and the N - 1 best candidates

Of a block drafter (DFLASH), one step is a pass over a whole block, so that S is 1, and N is the size of the block:

--speculative-dflash-block-size N   the same as --speculative-num-draft-tokens N
S above 1, or K above 1             a tree of S levels, or of as many as the block has positions behind the root
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.errors import ConfigError

_STEPS, _TOPK, _ROWS = "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens"
_SIZE = "--speculative-dflash-block-size"


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


def block_shape(steps: int | None, topk: int | None, rows: int | None, size: int | None) -> TreeShape | None:
    """The shape that the flags set for a block drafter; None if they set none. size: --speculative-dflash-block-size.

    Raises ConfigError for flags that contradict one another, or do not fix the tree.
    """
    for flag, value, least in ((_STEPS, steps, 1), (_TOPK, topk, 1), (_ROWS, rows, 2), (_SIZE, size, 2)):
        if value is not None and value < least:
            raise ConfigError(f"{flag} must be {least} or more, not {value}")
    breadth, levels = topk or 1, steps if steps != 1 else None
    if size is not None and levels is not None and levels >= size:
        raise ConfigError(f"{_STEPS} {levels} needs a block of {levels + 1} positions or more, not {_SIZE} {size}")
    if breadth == 1:
        chain = size if size is not None else rows
        if size is not None and rows not in (None, size) and levels is None:
            raise ConfigError(f"{_SIZE} {size} and {_ROWS} {rows} are the same number of a chain; set one of them")
        levels = levels if levels is not None or chain is None else chain - 1
        return None if levels is None else TreeShape(levels, 1, levels + 1)
    levels = levels if levels is not None or size is None else size - 1
    if levels is None or rows is None:
        raise ConfigError(
            f"{_TOPK} {breadth} with DFLASH fixes a tree together with {_ROWS} and the number of its levels, "
            f"{_STEPS} or {_SIZE}; set them, or none for adaptive trees"
        )
    shape = TreeShape(levels, breadth, rows)
    return replace(shape, rows=min(rows, shape.candidates + 1))
