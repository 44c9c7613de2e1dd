"""Settings from algorithms, tree shapes and the command line."""

import pytest

from bench.speculation.settings import PLAIN, Setting, grid, named, shapes


def test_grid_has_all_valid_trees():
    assert shapes([1, 3], [1, 4], [4, 8, 64]) == [(1, 1, 2), (1, 4, 4), (3, 1, 4), (3, 4, 4), (3, 4, 8)]
    assert shapes([5], [4], [4]) == [], "four tokens never suffice for a depth of five"
    settings = grid(["NGRAM", "EAGLE3+NGRAM"], [3], [1, 4], [8], "head")
    assert [(s.name, s.kind) for s in settings] == [
        ("NGRAM, adaptive", "adaptive"),
        ("NGRAM, 8 tokens", "fixed"),
        ("EAGLE3+NGRAM, adaptive", "adaptive"),
        ("EAGLE3+NGRAM, 3x1x4", "fixed"),
        ("EAGLE3+NGRAM, 3x4x8", "fixed"),
    ]
    assert settings[1].flags == ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    assert " ".join(settings[4].flags) == (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path head --speculative-ngram-beside "
        "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    )
    assert PLAIN.kind == "plain"


def test_settings_on_the_command_line():
    assert named("mine=--speculative-algorithm NGRAM --speculative-num-draft-tokens=4") == Setting(
        "mine", "mine", ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens=4")
    )
    assert named("mine=--speculative-algorithm NGRAM --speculative-num-draft-tokens=4").kind == "fixed"
    with pytest.raises(ValueError, match="NAME=FLAGS"):
        named("--speculative-algorithm NGRAM")
