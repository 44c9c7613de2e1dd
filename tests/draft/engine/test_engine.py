"""The draft engine over a model, against the oracle."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.errors import InvalidRequest, Unavailable
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.speculation.proposal import UNLIMITED_DRAFT, Commit, path_hash
from outrider.speculation.sampling import SamplingParams
from tests.support.draft.helpers import (
    GREEDY,
    OracleTarget,
    commit_of,
    finish,
    ngram,
    request,
    settle,
    standalone,
    torch_logits,
)
from tests.support.draft.prompts import PROMPT
from tests.support.tiny import EOS, VOCAB, write_model

# --- commits, whatever the transport does to them ---


@pytest.mark.parametrize("kind", ["NGRAM", "STANDALONE"])
def test_commits_doubled_overlapping_and_missing(kind, model):
    engine = ngram() if kind == "NGRAM" else standalone(model)
    tokens = [*PROMPT, *PROMPT]
    engine.open(request(1, tokens))
    settle(engine)
    first, second = commit_of(tokens, [5, 6]), commit_of([*tokens, 5, 6], [7])
    both = commit_of(tokens, [5, 6, 7])
    for commit in (first, first, second, both, first, commit_of([*tokens, 5], [6, 7, 8])):
        engine.receive([], [commit])
        settle(engine)
    (session,) = engine.running.values()
    assert session.tokens.tolist() == [*tokens, 5, 6, 7, 8]
    assert session.tree.root_hash == path_hash(session.tokens)
    # A gap fails the session with an error that names the remedy.
    engine.receive([], [commit_of([*tokens, 5, 6, 7, 8, 9], [10])])
    (failure,) = [f for output in settle(engine) for f in output.failures]
    assert failure.session_id == 1
    assert isinstance(failure.error, Unavailable)
    assert "open it again" in failure.error.message
    assert engine.load().running_sessions == 0
    engine.receive([], [commit_of(tokens, [1])])  # late, for a session that is gone
    assert engine.idle


@pytest.mark.parametrize("kind", ["NGRAM", "STANDALONE"])
def test_many_commits_at_once_are_those_one_by_one(kind, model):
    """While drafting is paused many commits arrive together; the state after them is the same."""
    rng = np.random.default_rng(3)
    engines = [ngram() if kind == "NGRAM" else standalone(model) for _ in range(2)]
    texts = {1: [*PROMPT, *PROMPT]}
    for engine in engines:
        for session_id, tokens in texts.items():
            engine.open(request(session_id, tokens, max_tokens=500))
    for _ in range(6):
        frame = []
        for step in range(5):
            for session_id, tokens in texts.items():
                new = rng.integers(3, 12, rng.integers(1, 4)).tolist()
                commit = replace(commit_of(tokens, new), session_id=session_id)
                frame.append(replace(commit, draft_budget=UNLIMITED_DRAFT if step == 4 else 0))
                tokens += new
        together, alone = engines
        together.receive([], frame)
        for commit in frame:
            alone.receive([], [commit])
        sent = [{(p.session_id, p.anchor_hash, t) for o in settle(e) for p in o.proposals for t in p.tokens.tolist()}
                for e in engines]  # fmt: skip
        assert sent[0] == sent[1] != set()
        for engine in engines:
            assert {i: s.tokens.tolist() for i, s in engine.running.items()} == texts


def test_silent_divergence_fails_the_session():
    engine = ngram()
    engine.open(request(1, PROMPT))
    settle(engine)
    wrong = Commit(1, len(PROMPT), np.array([5], np.uint32), root_hash=12345)
    engine.receive([], [wrong])
    (failure,) = [f for output in settle(engine) for f in output.failures]
    assert "differ" in failure.error.message


def test_finished_sessions_are_closed(model):
    engine = standalone(model)
    engine.open(request(1, PROMPT))
    settle(engine)
    engine.receive([], [finish(commit_of(PROMPT, [5]))])
    assert engine.idle
    assert engine.load().running_sessions == 0
    engine.check()
    assert engine.drafter.prefix.allocator.leased_pages == 0


def test_an_empty_session_is_refused():
    with pytest.raises(InvalidRequest):
        ngram().open(request(1, []))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def next_logits(model):
    return torch_logits(model)


SAMPLED = SamplingParams(1.0, seed=11)
FILTERED = SamplingParams(0.8, top_k=20, top_p=0.9, seed=12)


# --- a model ---


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, FILTERED], ids=["greedy", "sampled", "filtered"])
def test_a_draft_equal_to_the_target_is_accepted(model, next_logits, sampling):
    engine = standalone(model)
    opened = request(1, PROMPT, sampling, max_tokens=500)
    engine.open(opened)
    target = OracleTarget(next_logits, opened)
    for _ in range(12):
        for _ in range(8):
            if not engine.idle:
                target.hear(engine.step())
        engine.receive([], [target.step()])
    assert target.unknown == 0
    # The first step has a chain of its own; from then on nearly every step accepts several tokens.
    taken = [commit.accepted for commit in target.commits]
    assert np.mean([count >= 2 for count in taken]) > 0.9, taken
    assert [s.tokens.tolist() for s in engine.running.values()] == [target.tokens]


def test_scores_are_calibrated(model, next_logits):
    """Over many sampled positions, the acceptance rate of children equals their mean probability, about."""
    claimed = happened = 0.0
    engine = standalone(model)
    for seed in range(6):
        sampling = SamplingParams(1.0, seed=seed)
        opened = request(seed, PROMPT[seed:], sampling)
        engine.open(opened)
        target = OracleTarget(next_logits, opened, budget=0)
        for _ in range(6):
            outputs = settle(engine)
            roots = [p for o in outputs for p in o.proposals if p.anchor_length == len(target.tokens)]
            commit = target.step()
            engine.receive([], [commit])
            if roots:
                tops = roots[0].parents < 0
                claimed += np.exp(roots[0].log_scores[tops]).sum()
                happened += commit.tokens[0] in roots[0].tokens[tops]
        engine.close(seed)
    assert happened / claimed > 0.7
    engine.check()


def test_drafting_ahead_survives_a_commit_without_new_work(model, next_logits):
    engine = standalone(model)
    opened = request(1, PROMPT)
    engine.open(opened)
    settle(engine)
    (session,) = engine.running.values()
    tree = session.tree
    best = max((n for n in range(len(tree)) if tree.depth[n] == 2), key=lambda n: tree.path_score[n])
    below = [n for n in range(len(tree)) if best in ancestors(tree, n)]
    assert below
    new = tree.path_tokens(best)
    rows = engine.drafter.load().step_tokens
    engine.receive([], [commit_of(PROMPT, new)])
    assert len(session.tree) == len(below)
    assert session.root_expanded
    assert engine.drafter.load().step_tokens == rows  # nothing was computed
    settle(engine)
    target = OracleTarget(next_logits, request(1, [*PROMPT, *new]))
    # What survived and what grew on it is still what the model itself would say.
    assert target.step().tokens[0] == session.tree.token[session.tree.root_children[0]]


def ancestors(tree, node):
    found = []
    while (node := tree.parent[node]) >= 0:
        found.append(node)
    return found


def test_limits_of_depth_and_children(model):
    engine = standalone(model, speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
    engine.open(request(1, PROMPT))
    settle(engine)
    (session,) = engine.running.values()
    tree = session.tree
    assert max(tree.depth) == 3
    assert max(map(len, [tree.root_children, *tree.children])) == 2
    engine.close(1)
    # The last token that a session may have comes as a bonus: two new tokens leave room for one node.
    engine.open(request(2, PROMPT, max_tokens=2))
    settle(engine)
    (session,) = engine.running.values()
    assert max(session.tree.depth) == 1


def test_stop_tokens_end_a_path_or_cannot_come_yet(model):
    engine = standalone(model)
    engine.open(request(1, PROMPT, max_tokens=50, min_tokens=50))
    settle(engine)
    (session,) = engine.running.values()
    first = [session.tree.token[n] for n in session.tree.root_children]
    banned = first[0]
    engine.close(1)
    engine.open(request(2, PROMPT, max_tokens=50, min_tokens=50, stop_token_ids=(banned,)))
    settle(engine)
    (session,) = engine.running.values()
    assert banned not in session.tree.token
    assert EOS not in session.tree.token
    engine.close(2)
    engine.open(request(3, PROMPT, max_tokens=50, stop_token_ids=(banned,)))
    settle(engine)
    (session,) = engine.running.values()
    node = session.tree.token.index(banned)
    assert session.tree.children[node] == []


def test_many_sessions_share_and_pages_come_home(model, next_logits):
    """More sessions than slots, and prompts of many lengths: all are drafted for in the end."""
    engine = standalone(model, max_running_requests=3)
    rng = np.random.default_rng(5)
    requests = {i: request(i, rng.integers(4, VOCAB, size).tolist()) for i, size in enumerate((3, 150, 1, 64, 65, 9))}
    for opened in requests.values():
        engine.open(opened)
    drafted = set()
    while requests:
        for output in settle(engine):
            drafted |= {proposal.session_id for proposal in output.proposals}
        running = list(engine.running)
        assert len(running) == min(3, len(requests))
        for session_id in running:
            opened = requests.pop(session_id)
            target = OracleTarget(next_logits, opened)
            session = engine.running[session_id]
            assert target.step().tokens[0] == session.tree.token[session.tree.root_children[0]]
            engine.close(session_id)
    assert drafted == set(range(6))
    engine.check()
    assert engine.drafter.prefix.allocator.leased_pages == 0


def test_pages_are_exhausted_and_released(model):
    engine = standalone(model)
    # 12 pages of 16: each session needs 4 of them for its scratch and 2 for its prompt.
    engine.drafter.prefix = PrefixCache(PageAllocator(12, 16))
    for session_id in (1, 2, 3):
        engine.open(request(session_id, PROMPT, max_tokens=500))
    settle(engine)
    assert (engine.load().running_sessions, engine.load().waiting_sessions) == (2, 1)
    tokens = list(PROMPT)
    new = list(range(4, 30))
    engine.receive([], [commit_of(tokens, new, session_id=1)])
    settle(engine)
    # No page is left for the longer one: it waits, commits still reach it, and another one has its pages.
    assert set(engine.running) == {2, 3}
    tokens += new
    engine.receive([], [commit_of(tokens, [50], session_id=1)])
    engine.close(2)
    engine.close(3)
    settle(engine)
    assert engine.running[1].tokens.tolist() == [*tokens, 50]
    assert engine.running[1].tree.root_children
    engine.close(1)
    engine.check()
    assert engine.drafter.prefix.allocator.leased_pages == 0


def test_closed_waiting_session_does_not_block_others(model):
    engine = standalone(model)
    engine.drafter.prefix = PrefixCache(PageAllocator(12, 16))
    engine.open(request(1, PROMPT, max_tokens=500))
    engine.open(request(2, PROMPT * 10, max_tokens=500))
    engine.open(request(3, PROMPT, max_tokens=500))
    assert (set(engine.running), list(engine.waiting)) == ({1}, [2, 3])
    engine.close(2)
    assert set(engine.running) == {1, 3}
    for session_id in (1, 3):
        engine.close(session_id)
    engine.check()


def test_reopened_session_keeps_its_queue_order(model):
    engine = standalone(model, max_running_requests=1)
    for session_id in (1, 2, 1):
        engine.open(request(session_id, PROMPT, max_tokens=500))
    assert (set(engine.running), list(engine.waiting)) == ({1}, [2])


def test_sessions_beyond_the_context_are_not_drafted_for(model):
    engine = standalone(model)
    limit = engine.drafter.max_session_tokens
    assert limit == 512
    engine.open(request(1, [5] * limit))
    assert engine.idle
    engine.open(request(2, [5] * (limit - 3)))
    settle(engine)
    tokens = [5] * (limit - 3)
    for new in ([6, 7, 8], [9], [10, 11]):
        engine.receive([], [commit_of(tokens, new, session_id=2)])
        tokens += new
        (answer,) = (proposal for output in settle(engine) for proposal in output.proposals)
        assert (answer.committed_length, len(answer.tokens)) == (len(tokens), 0), "or its target would wait for one"
    assert engine.drafter.prefix.allocator.leased_pages == 0


def test_only_warmed_up_shapes_are_compiled(model):
    engine = standalone(model)
    engine.drafter.warm_up()
    compiled = engine.drafter.runner.compilations.total
    for session_id in range(4):
        engine.open(request(session_id, PROMPT * (1 + 3 * session_id), SamplingParams(0.5 * session_id, seed=1)))
        settle(engine)
    assert engine.drafter.runner.compilations.total == compiled
