"""N-grams: plain against a list of paths, compiled against plain, SGLang's worked vector, calibration of scores."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError
from outrider.speculation.proposal import Commit, path_hash
from services.draft.drafters.ngram import NgramDrafter, store
from services.draft.engine.engine import DraftEngine
from services.draft.ngrams.base import NO_NAMESPACE, NgramOptions
from services.draft.ngrams.compiled import CompiledNgrams, load
from services.draft.ngrams.plain import PlainNgrams
from services.draft.ngrams.trie import Trie
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.session import DraftSession
from tests.support.draft.helpers import finish, request, settle


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
        assert [(*path, child.token) for child in node.frequent(2, 99)] == frequent


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.lists(st.integers(0, 3), max_size=8))
def test_match_finds_every_suffix_with_children(sequence, context):
    trie, twin = Trie(1000, 6, 1, 4), Twin(1000, 6, 1)
    trie.insert(sequence)
    twin.insert(sequence)
    expected = []
    for window in range(min(4, len(context)), 0, -1):
        suffix = tuple(context[-window:])
        if suffix in twin.nodes and twin.children(suffix):
            expected.append((twin.nodes[suffix][0], window))
    assert [(node.frequency, window) for node, window in trie.match(context)] == expected


KINDS = {"plain": PlainNgrams, "compiled": CompiledNgrams}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def lookup(kind, options, stored, tokens):
    drafter = NgramDrafter(options, kind(options))
    drafter.ngrams.insert(np.array(stored, np.uint32))
    session = DraftSession(request(1, tokens), TreeLimits(children=256), ())
    return drafter.look_up(session, -1)


def test_worked_vector(kind):
    growth = lookup(kind, NgramOptions(draft_token_num=6), [1, 2, 3, 4, 5, 1, 2, 6, 7], [9, 1, 2])
    assert growth.tokens == [6, 3, 7, 4, 5]
    # SGLang counts the root as node 0: parents 0, 0, 1, 2, 4 there.
    assert growth.parents == [-1, -1, 0, 1, 3]
    assert max(growth.log_scores) < 0


def test_no_zero_padding(kind):
    growth = lookup(kind, NgramOptions(draft_token_num=12), [1, 2, 3], [9, 9, 1])
    assert growth.tokens == [2, 3]


def test_by_frequency(kind):
    options = NgramOptions(match_type="PROB", draft_token_num=4, max_bfs_breadth=2)
    # After 5: 6 twice, 7 three times; after 5 7: 8 always. 5 6 and 5 7 8 compete by share of frequency.
    stored = [5, 7, 8, 0, 5, 6, 1, 0, 5, 7, 8, 0, 5, 6, 2, 0, 5, 7, 8]
    growth = lookup(kind, options, stored, [3, 5])
    assert growth.tokens == [7, 8, 0]
    assert growth.parents == [-1, 0, 1]


def test_breadth_narrows_with_depth_and_match(kind):
    options = NgramOptions(draft_token_num=100, max_match_window_size=2, max_bfs_breadth=3, branch_length=3)
    stored = [token for last in (11, 12, 13, 14) for token in (1, 2, last)]
    # The match of two tokens has breadth 1: the last stored child. The match of one token adds a second child:
    # its breadth is (2 - 1) * (3 - 1) / 2 + 1 = 2.
    growth = lookup(kind, options, stored, [1, 2])
    firsts = [t for t, p in zip(growth.tokens, growth.parents, strict=True) if p == -1]
    assert firsts == [14, 13]


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_probabilities_of_siblings_add_up_to_at_most_one(kind, match_type):
    rng = np.random.default_rng(3)
    options = NgramOptions(match_type=match_type, draft_token_num=40)
    growth = lookup(kind, options, rng.integers(0, 5, 400).tolist(), rng.integers(0, 5, 20).tolist())
    total = {}
    for parent, score in zip(growth.parents, growth.log_scores, strict=True):
        total[parent] = total.get(parent, 0) + np.exp(score)
    assert total[-1] <= 1.0 + 1e-6


# --- compiled against plain ---

OPTIONS = [
    NgramOptions("BFS", 1, 4, 1, 3, 6, 60, 9),
    NgramOptions("PROB", 1, 4, 1, 3, 6, 60, 9),
    NgramOptions("BFS", 2, 3, 2, 5, 4, 10_000, 40),
    NgramOptions("PROB", 2, 5, 1, 9, 8, 10_000, 40),
]


@given(st.sampled_from(OPTIONS), st.integers(0, 2**32 - 1), st.integers(2, 40))
def test_compiled_is_plain(options, seed, vocabulary):
    """The same lookups, the same children in the same order, the same accuracies, through evictions and namespaces."""
    rng = np.random.default_rng(seed)
    plain, compiled = PlainNgrams(options), CompiledNgrams(options)
    tokens = rng.integers(0, vocabulary, 12).astype(np.uint32)
    for _ in range(25):
        fresh = int(rng.integers(1, 6))
        tokens = np.concatenate([tokens, rng.integers(0, vocabulary, fresh).astype(np.uint32)])[-40:]
        namespace_id = int(rng.choice([NO_NAMESPACE, NO_NAMESPACE, 2**31 + 7]))
        noisy = bool(rng.random() < 0.5)
        keys = rng.integers(0, 2**32, (options.branch_length + 1, 2)).astype(np.uint32) if noisy else None
        for ngrams in (plain, compiled):
            if fresh == 5:
                ngrams.insert(tokens, namespace_id)
            ngrams.commit(tokens, fresh, noisy=noisy, namespace_id=namespace_id)
        assert len(plain) == len(compiled) <= options.capacity
        for length in range(options.min_match_window_size, options.max_match_window_size + 3):
            assert plain.accuracy(length, noisy=noisy) == compiled.accuracy(length, noisy=noisy)
        expected, found = plain.look_up(tokens, keys, namespace_id), compiled.look_up(tokens, keys, namespace_id)
        assert found[:2] == expected[:2]
        np.testing.assert_allclose(found.log_scores, expected.log_scores, rtol=1e-6)
    for path in [(), *paths(plain.trie)]:
        node = find(plain.trie, path)
        expected = [(child.token, child.frequency) for child in node.recent(99)]
        assert compiled.children(np.array(path, np.uint32)) == expected
    for ngrams in (plain, compiled):
        ngrams.clear()
        assert len(ngrams) == 0
        assert ngrams.look_up(tokens, None) == ([], [], [])
        ngrams.insert(tokens)
        assert len(ngrams) > 0


def test_sessions_of_different_salts_share_nothing():
    drafter = NgramDrafter(NgramOptions())
    engine = DraftEngine(drafter, TreeLimits(children=256), 8)
    engine.open(replace(request(1, [5, 6, 7, 8, 9, 5, 6]), cache_salt="a"))
    settle(engine)
    for salt, known in (("", False), ("b", False), ("a", True)):
        engine.open(replace(request(7, [1, 5, 6]), cache_salt=salt))
        assert any(len(p.tokens) for output in settle(engine) for p in output.proposals) == known, salt


def test_long_prompts_are_stored_in_slices(kind):
    options = NgramOptions()
    tokens = np.random.default_rng(1).integers(0, 200, 5000).astype(np.uint32)
    whole = kind(options)
    whole.insert(tokens)
    engine = DraftEngine(NgramDrafter(options, kind(options)), TreeLimits(children=256), 8)
    engine.open(request(1, tokens.tolist()))
    assert len(engine.drafter.ngrams) < len(whole) / 2
    engine.open(request(2, [1, 2, 3, 1, 2]))
    spoke = []  # in each round: who proposed something
    while not engine.idle:
        spoke.append({proposal.session_id for proposal in engine.step().proposals})
    assert 2 in spoke[0]
    assert len(spoke) > 5
    engine.close(1)
    assert len(engine.drafter.ngrams) >= len(whole)
    assert engine.drafter.ngrams.look_up(tokens[500:512], None) == whole.look_up(tokens[500:512], None)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_long_commits_are_stored_whole(kind, size):
    """While drafting is paused, many tokens arrive in one commit."""
    options = NgramOptions()
    text = np.random.default_rng(0).integers(0, 30_000, 640).astype(np.uint32)
    engine = DraftEngine(NgramDrafter(options, kind(options)), TreeLimits(children=256), 8)
    engine.open(request(1, [5, 6, 7], max_tokens=1000))
    tokens = [5, 6, 7]
    for start in range(0, len(text), size):
        new, base = text[start : start + size], len(tokens)
        tokens += new.tolist()
        engine.receive([], [Commit(1, base, new, path_hash(np.array(tokens)), draft_budget=0)])
    for i in range(8, len(text) - 1, 7):
        found = engine.drafter.ngrams.look_up(text[i - 8 : i], None)
        assert text[i] in [token for token, parent in zip(found.tokens, found.parents, strict=True) if parent < 0]


def test_answer_that_arrives_with_its_end_is_stored(kind):
    options = NgramOptions(insert_prompts=False)
    engine = DraftEngine(NgramDrafter(options, kind(options)), TreeLimits(children=256), 1)
    tokens = list(range(5, 40))
    for session_id in (1, 2):  # the second one ends while it waits for a place
        engine.open(request(session_id, tokens[:3], max_tokens=1000))
    commits = [
        Commit(1, n, np.array([tokens[n]], np.uint32), path_hash(np.array(tokens[: n + 1])), draft_budget=0)
        for n in range(3, len(tokens))
    ]
    engine.receive([], [replace(finish(commits[0]), session_id=2), *commits[:-1], finish(commits[-1])])
    for n in range(3, len(tokens)):
        assert tokens[n] in engine.drafter.ngrams.look_up(np.array(tokens[n - 3 : n], np.uint32), None).tokens


def test_capacity_beyond_memory_is_refused(monkeypatch):
    monkeypatch.setattr(load(), "outrider_ngrams_new", lambda *_: None)
    with pytest.raises(ConfigError, match=r"no room for 4096 nodes.*--speculative-ngram-capacity"):
        store(NgramOptions(capacity=4096))


def test_a_node_takes_less_than_60_bytes():
    ngrams = CompiledNgrams(NgramOptions(capacity=1 << 20))
    ngrams.insert(np.random.default_rng(0).integers(0, 50_000, 80_000).astype(np.uint32))
    assert len(ngrams) == 1 << 20
    assert ngrams.nbytes <= 60 * len(ngrams)


# --- what scores mean ---


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("predictable", [0.3, 0.9])
def test_scores_are_calibrated(predictable, noisy):
    """In any text the acceptance rate of the root's children equals their mean probability; also by window."""
    rng = np.random.default_rng(5)
    phrases = [rng.integers(0, 300, 8).tolist() for _ in range(20)]
    text = []
    while len(text) < 6000:
        text += phrases[rng.integers(20)] if rng.random() < predictable else rng.integers(0, 300, 8).tolist()
    tokens = np.array(text, np.uint32)
    ngrams = CompiledNgrams(NgramOptions())
    promised, came = np.zeros(13), np.zeros(13)
    for end in range(20, len(tokens) - 1):
        keys = rng.integers(0, 2**32, (19, 2)).astype(np.uint32) if noisy else None
        found = ngrams.look_up(tokens[:end][-12:], keys)
        if end > 2000:
            for token, parent, score in zip(*found, strict=True):
                if parent < 0:
                    promised[0] += np.exp(score)
                    came[0] += token == tokens[end]
        ngrams.commit(tokens[: end + 1][-18:], 1, noisy=noisy)
    assert came[0] > 200
    if not noisy:
        assert promised[0] / came[0] == pytest.approx(1.0, abs=0.12)
    assert ngrams.accuracy(8, noisy=noisy) != 8 / 10
