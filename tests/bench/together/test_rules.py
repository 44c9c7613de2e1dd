"""Replay of rules that merge two drafters' trees, on trees written by hand."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.together.cut_copy import write_cut_copy
from bench.together.rules import Alone, Combined, Highest, Oracle, Split, Text, replay
from bench.together.trees import Nodes

TEXT = Text("qa", 0.0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])


def chain(place, right, claim):
    """A chain of four tokens, of which the first `right` are those of the text."""
    tokens = [TEXT.tokens[place + i] if i < right and place + i < 10 else 90 + i for i in range(4)]
    return Nodes(tokens, [-1, 0, 1, 2], [math.log(claim)] * 4)


def lengths(rule, budget, first=2, second=1):
    trees = [[[chain(place, right, claim) for place in range(10)]] for right, claim in ((first, 0.5), (second, 0.9))]
    return [step.tokens for step in replay(rule, [TEXT], trees, budget)]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Alone(0), [3, 3, 3, 1]),
        (Alone(1), [2, 2, 2, 2, 2]),
        (Split(), [3, 3, 3, 1]),  # 1, 2 of the first, 90 of the second and 92
        (Highest(), [2, 2, 2, 2, 2]),  # the second drafter's chain alone
        (Highest(1), [2, 2, 2, 2, 2]),
        (Oracle(), [3, 3, 3, 1]),
    ],
    ids=["first", "second", "split", "highest", "highest, one level", "oracle"],
)
def test_steps_commit_what_a_rule_verifies(rule, expected):
    assert lengths(rule, 4) == expected


def test_the_combined_rule_learns_within_a_text():
    """The second drafter is never right, but claims 0.9: after some steps the first one's nodes are verified."""
    steps = lengths(Combined(2), 4, first=1, second=0)
    assert steps[0] == 1
    assert max(steps[-2:]) == 2


def test_a_cut_copy_lacks_layers(tmp_path):
    whole, copy = tmp_path / "whole", tmp_path / "copy"
    whole.mkdir()
    (whole / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "hidden_size": 2}))
    layers = {f"model.layers.{i}.mlp.up_proj.weight": torch.full((2, 2), i, dtype=torch.bfloat16) for i in range(3)}
    save_file(layers | {"model.norm.weight": torch.ones(2)}, whole / "model.safetensors")
    write_cut_copy(whole, copy, [1])
    assert json.loads((copy / "config.json").read_text()) == {"num_hidden_layers": 2, "hidden_size": 2}
    cut = load_file(copy / "model.safetensors")
    assert {name: float(tensor.mean()) for name, tensor in cut.items()} == {
        "model.layers.0.mlp.up_proj.weight": 0.0, "model.layers.1.mlp.up_proj.weight": 2.0, "model.norm.weight": 1.0,
    }  # fmt: skip
