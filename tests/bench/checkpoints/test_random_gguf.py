"""Random GGUF files: the types of the published mixtures, and weights with the spread of trained ones."""

from collections import Counter

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, quants

from bench.checkpoints import random_gguf
from bench.checkpoints.blocks import TYPES, random_rows
from bench.checkpoints.random_gguf import SHAPES, Shape, write_random_gguf
from bench.checkpoints.vocabulary import Vocabulary, vocabulary

WORDS = Vocabulary(
    ["<|end|>", "a", "b", "ab"], [3, 1, 1, 1], ["a b"], {"eos": 0}, "smollm", "{{ messages[0].content }}"
)


@pytest.mark.parametrize(("size", "counts"), [
    ("0.5B", {"Q5_0": 132, "Q8_0": 13, "Q4_K": 12, "Q6_K": 12, "F32": 121}),  # as in the published file of Qwen2.5
    ("1.5B", {"Q4_K": 168, "Q6_K": 29, "F32": 141}),
])  # fmt: skip
def test_types_are_those_of_published_files(size, counts):
    assert Counter(one.kind.name for one in random_gguf._tensors(SHAPES[size], "Q4_K_M")) == counts


@pytest.mark.parametrize("kind", TYPES)
def test_weights_have_the_wanted_spread(kind):
    weights = quants.dequantize(random_rows(kind, 64, 512, 0.05, np.random.default_rng(1)), kind)
    assert weights.shape == (64, 512)
    assert weights.std() == pytest.approx(0.05, rel=0.1)
    assert abs(weights.mean()) < 0.002


def test_equal_seeds_give_equal_files(tmp_path):
    shape = Shape(hidden=256, layers=2, heads=4, kv_heads=2, intermediate=512, vocab=4, tied=False)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_random_gguf(tmp_path / name, shape, seed=seed, words=WORDS)
    contents = [(tmp_path / name).read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "a").tensors}
    assert tensors["output.weight"].tensor_type == Type.Q6_K
    assert tensors["blk.0.attn_q.weight"].shape.tolist() == [256, 256]


def test_every_token_of_a_larger_vocabulary_has_a_text_of_its_own():
    found = vocabulary(49152 + 100)
    assert len(set(found.tokens)) == len(found.tokens) == len(found.types)
    left, right = found.merges[-1].split(" ")
    assert found.tokens[-1] == left + right
