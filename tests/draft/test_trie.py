"""The trie against a twin that recomputes everything from the list of stored paths, and SGLang's worked vector."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from services.draft.drafters.trie import Trie
from services.draft.frontier import TreeLimits
from services.draft.session import DraftSession
from tests.draft.helpers import request


class Twin:
    """Paths with frequency and time of last storing, in plain dictionaries."""

    def __init__(self, capacity, branch_length, min_window):
        self.capacity, self.branch_length, self.min_window = capacity, branch_length, min_window
        self.nodes = {}  # path -> [frequency, stamp]
        self.stamp = 0

    def insert(self, tokens):
        for start in range(len(tokens) - self.min_window):
            self.stamp += 1
            path = tuple(tokens[start : start + self.branch_length])
            for end in range(1, len(path) + 1):
                prefix = path[:end]
                if prefix in self.nodes:
                    self.nodes[prefix] = [self.nodes[prefix][0] + 1, self.stamp]
                    continue
                if len(self.nodes) >= self.capacity:
                    oldest = min(self.nodes, key=lambda p: (self.nodes[p][1], -len(p)))
                    if self.nodes[oldest][1] == self.stamp:
                        break
                    del self.nodes[oldest]
                self.nodes[prefix] = [1, self.stamp]

    def children(self, path):
        found = [p for p in self.nodes if p[:-1] == path]
        return sorted(found, key=lambda p: -self.nodes[p][1])


def paths(trie):
    found = {}
    pending = [((), trie.root)]
    while pending:
        path, node = pending.pop()
        for token, child in node.children.items():
            found[(*path, token)] = [child.frequency, child.stamp]
            pending.append(((*path, token), child))
    return found


def find(trie, path):
    node = trie.root
    for token in path:
        node = node.children[token]
    return node


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=8),
    st.integers(3, 40),
    st.integers(2, 5),
    st.integers(1, 2),
)
def test_trie_against_twin(sequences, capacity, branch_length, min_window):
    trie, twin = Trie(capacity, branch_length, min_window, branch_length - 1), Twin(capacity, branch_length, min_window)
    for sequence in sequences:
        trie.insert(sequence)
        twin.insert(sequence)
        assert paths(trie) == twin.nodes
        assert len(trie) == len(twin.nodes) <= capacity
    for path in [(), *twin.nodes]:
        node = find(trie, path)
        recent = twin.children(path)
        assert [(*path, child.token) for child in node.recent(99)] == recent
        frequent = sorted(recent, key=lambda p: -twin.nodes[p][0])[:2]
        assert [(*path, child.token) for child in node.frequent(2)] == frequent


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.lists(st.integers(0, 3), max_size=8))
def test_match_finds_every_suffix_that_goes_on(sequence, context):
    trie, twin = Trie(1000, 6, 1, 4), Twin(1000, 6, 1)
    trie.insert(sequence)
    twin.insert(sequence)
    expected = []
    for window in range(min(4, len(context)), 0, -1):
        suffix = tuple(context[-window:])
        if suffix in twin.nodes and twin.children(suffix):
            expected.append((twin.nodes[suffix][0], window))
    assert [(node.frequency, window) for node, window in trie.match(context)] == expected


def lookup(options, stored, tokens):
    drafter = NgramDrafter(options)
    drafter.trie.insert(stored)
    session = DraftSession(request(1, tokens), TreeLimits(children=256), ())
    return drafter._look_up(session, -1)


def test_worked_vector():
    growth = lookup(NgramOptions(draft_token_num=6, insert_prompts=False), [1, 2, 3, 4, 5, 1, 2, 6, 7], [9, 1, 2])
    assert growth.tokens == [6, 3, 7, 4, 5]
    # SGLang counts the root as node 0: parents 0, 0, 1, 2, 4 there.
    assert growth.parents == [-1, -1, 0, 1, 3]
    assert max(growth.log_scores) < 0


def test_no_zero_padding():
    growth = lookup(NgramOptions(draft_token_num=12), [1, 2, 3], [9, 9, 1])
    assert growth.tokens == [2, 3]


def test_by_frequency():
    options = NgramOptions(match_type="PROB", draft_token_num=4, max_bfs_breadth=2)
    # After 5: 6 twice, 7 three times; after 5 7: 8 always. 5 6 and 5 7 8 compete by share of frequency.
    stored = [5, 7, 8, 0, 5, 6, 1, 0, 5, 7, 8, 0, 5, 6, 2, 0, 5, 7, 8]
    growth = lookup(options, stored, [3, 5])
    assert growth.tokens == [7, 8, 0]
    assert growth.parents == [-1, 0, 1]


def test_breadth_narrows_with_depth_and_match():
    options = NgramOptions(draft_token_num=100, max_match_window_size=2, max_bfs_breadth=3, branch_length=3)
    stored = [token for last in (11, 12, 13, 14) for token in (1, 2, last)]
    # The match of two tokens has breadth 1: the last stored child. The match of one token adds a second child:
    # its breadth is (2 - 1) * (3 - 1) / 2 + 1 = 2.
    growth = lookup(options, stored, [1, 2])
    firsts = [t for t, p in zip(growth.tokens, growth.parents, strict=True) if p == -1]
    assert firsts == [14, 13]


def test_probabilities_of_siblings_add_up_to_at_most_one():
    rng = np.random.default_rng(3)
    for match_type in ("BFS", "PROB"):
        options = NgramOptions(match_type=match_type, draft_token_num=40)
        growth = lookup(options, rng.integers(0, 5, 400).tolist(), rng.integers(0, 5, 20).tolist())
        total = {}
        for parent, score in zip(growth.parents, growth.log_scores, strict=True):
            total[parent] = total.get(parent, 0) + np.exp(score)
        assert total[-1] <= 1.0 + 1e-6
