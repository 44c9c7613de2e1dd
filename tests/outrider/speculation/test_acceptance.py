"""The verification rule: truth table, and equal text for all drafts on toy models."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider.speculation.acceptance import accepted_path, decode, verify
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import EMPTY_SLICE, SpeculationTree, TreeSlice

VOCAB = 5


def next_logits(path):
    """A toy model whose logits depend on the last two tokens and the length."""
    seed = path[-1] * 31 + (path[-2] if len(path) > 1 else 0) * 7 + len(path) % 3
    return np.random.default_rng(seed).normal(size=VOCAB) * 1.5


def draft(*nodes):
    tokens, parents = zip(*nodes, strict=True)
    depths = np.zeros(len(nodes), np.int32)
    return TreeSlice(np.array(tokens, np.uint32), np.array(parents, np.int32), depths, np.zeros(len(nodes), np.float32))


#        root ── 5 (0) ── 7 (2) ── 9 (4)
#             └─ 6 (1) ── 7 (3)
TREE = draft((5, -1), (6, -1), (7, 0), (7, 1), (9, 2))


@pytest.mark.parametrize(
    ("sampled", "path", "bonus"),
    [
        ([8, 0, 0, 0, 0, 0], [], 8),  # the first sample is no child
        ([5, 8, 0, 0, 0, 0], [0], 8),
        ([6, 0, 7, 0, 3, 0], [1, 3], 3),  # the second branch
        ([5, 7, 0, 9, 0, 4], [0, 2, 4], 4),  # all of a branch
        ([7, 0, 0, 0, 0, 0], [], 7),  # a token that stands deeper in the tree is no child of the root
    ],
)
def test_truth_table(sampled, path, bonus):
    assert accepted_path(TREE, np.array(sampled)) == (path, bonus)


def test_without_a_draft_the_sample_is_the_bonus():
    assert accepted_path(EMPTY_SLICE, np.array([3])) == ([], 3)


@given(
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 1000),
    drafts=st.lists(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), max_size=6), min_size=12),
)
def test_the_text_is_the_same_for_any_draft(temperature, seed, drafts):
    params = SamplingParams(temperature=temperature, seed=seed)
    plain = decode(next_logits, [1, 2], params, 12)
    path = [1, 2]
    for paths in drafts:
        tree = SpeculationTree(np.array(path))
        for tokens in paths:
            node = -1
            for token in tokens:
                node = tree.add(node, token, -0.5)
        path += verify(next_logits, path, tree.select(16), params)
        assert path[2:14] == plain[: len(path) - 2]
        if len(path) >= 14:
            return


def test_speculative_text_follows_the_models_distribution():
    # Two tokens drawn with a draft of the likeliest ones, over 6,000 seeds, against the exact joint distribution.
    first = np.exp(next_logits([1, 2])) / np.exp(next_logits([1, 2])).sum()
    joint = np.stack([p * np.exp(x := next_logits([1, 2, t])) / np.exp(x).sum() for t, p in enumerate(first)])
    counts = np.zeros((VOCAB, VOCAB))
    tree = SpeculationTree(np.array([1, 2]))
    for token in np.argsort(-first)[:3]:
        tree.add(-1, int(token), float(np.log(first[token])))
    for seed in range(6000):
        params = SamplingParams(seed=seed)
        path = [1, 2, *verify(next_logits, [1, 2], tree.select(8), params)]
        if len(path) < 4:
            path += verify(next_logits, path, EMPTY_SLICE, params)
        counts[path[2], path[3]] += 1
    assert stats.chisquare(counts.ravel(), joint.ravel() * counts.sum()).pvalue > 1e-4
