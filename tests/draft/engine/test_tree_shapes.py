"""Flags that shape explicit trees and blocks."""

import pytest

from outrider.errors import ConfigError
from outrider.speculation.shape import TreeShape, block_shape, explicit_shape


def test_tree_flags_are_set_all_or_none():
    assert explicit_shape(None, None, None) is None
    assert explicit_shape(5, 8, 64) == TreeShape(5, 8, 64)
    assert explicit_shape(3, 1, 9) == TreeShape(3, 1, 4)
    for flags in ((3, None, None), (None, 4, None), (3, 4, None), (None, None, 8)):
        with pytest.raises(ConfigError, match="set all three, or none"):
            explicit_shape(*flags)


def test_a_tree_has_no_more_tokens_than_its_levels_give():
    shape = explicit_shape(2, 2, 8)
    assert shape == TreeShape(2, 2, 7)
    assert "--speculative-num-draft-tokens 8 becomes 7" in shape.note(8)
    assert "6 nodes below the root" in shape.note(8)
    assert explicit_shape(2, 3, 13) == TreeShape(2, 3, 13)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ((None, None, None, None), None), ((1, 1, None, None), None), ((None, None, 16, None), (15, 1, 16)),
        ((1, 1, 16, None), (15, 1, 16)), ((None, None, None, 16), (15, 1, 16)), ((1, 1, 16, 16), (15, 1, 16)),
        ((4, 1, 9, 16), (4, 1, 5)), ((4, None, None, None), (4, 1, 5)), ((5, 4, 16, None), (5, 4, 16)),
        ((1, 4, 16, 6), (5, 4, 16)), ((1, 4, 5, 2), (1, 4, 5)), ((2, 2, 8, None), (2, 2, 7)),
        ((1, 1, 2, None), (1, 1, 2)),
    ],
)  # fmt: skip
def test_shape_of_a_block(flags, shape):
    """SGLang's flags of DFLASH, where a step is a pass; and trees. The shape's own flags give the same shape."""
    found = block_shape(*flags)
    assert found == (None if shape is None else TreeShape(*shape))
    if found is not None:
        assert block_shape(*found.flags().values(), flags[3] or found.steps + 1) == found
        assert explicit_shape(*found.flags().values()) == found


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ((None, None, 8, 16), "are the same number of a chain"),
        ((None, 4, None, 16), "set them, or none for adaptive"),
        ((None, 4, 16, None), "set them, or none for adaptive"), ((16, 1, None, 16), "needs a block of 17 positions"),
        ((None, None, 1, None), "must be 2 or more, not 1"), ((None, None, None, 1), "must be 2 or more, not 1"),
    ],
)  # fmt: skip
def test_contradictory_shape_of_a_block(flags, what):
    with pytest.raises(ConfigError, match=what):
        block_shape(*flags)
    assert "a chain of 3 steps has 4 tokens" in explicit_shape(3, 1, 9).note(9)
