"""NGRAM beside a model: one tree, n-grams first, each drafter within its own limits."""

import numpy as np
import pytest

from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.speculation.proposal import Commit, path_hash
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.frontier import Frontier, TreeLimits
from services.draft.sessions.session import DraftSession
from tests.support.draft.helpers import GREEDY, OracleTarget, request, settle, standalone, torch_logits
from tests.support.tiny import VOCAB, write_model

CYCLE = [10, 11, 12, 13, 14, 15]
PROMPT = CYCLE * 4
SHAPE = {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("draft"))


def together(model, **flags):
    return standalone(model, speculative_ngram_beside=True, **flags)


def commit_of(tokens, new, session_id=1):
    return Commit(session_id, len(tokens), np.array(new, np.uint32), path_hash(np.array([*tokens, *new])))


def children(tree, node=ROOT):
    return [tree.token[child] for child in tree.children_of(node)]


def test_ngram_proposals_are_sent_before_the_model_runs(model):
    engine = together(model)
    engine.open(request(1, PROMPT))
    (proposal,) = engine.step().proposals
    assert proposal.tokens[:3].tolist() == CYCLE[:3]
    assert engine.drafter.load().step_tokens == 0  # the model has not run at all
    settle(engine)
    tokens = [*PROMPT, CYCLE[0], 77]
    engine.receive([], [commit_of(PROMPT, tokens[len(PROMPT) :])])
    engine.receive([], [commit_of(tokens, [10])])
    (proposal,) = engine.step().proposals
    assert proposal.anchor_length == len(tokens) + 1
    assert set(proposal.tokens.tolist()) <= {*CYCLE, 77}
    assert {11, 77} <= set(proposal.tokens.tolist())


@pytest.mark.parametrize("flags", [{}, SHAPE], ids=["adaptive", "explicit"])
def test_a_commit_is_replied_to_once_both_have_expanded_the_root(model, flags):
    """A target that waits for a reply waits for the model, too; what n-grams know is sent at once all the same."""
    engine = together(model, **flags)
    engine.open(request(1, PROMPT))
    settle(engine)
    engine.receive([], [commit_of(PROMPT, [77])])  # behind it the model must expand the root again
    engine.receive([], [commit_of([*PROMPT, 77], [10])])
    length, session = len(PROMPT) + 2, engine.sessions[1]
    replies = []
    for _ in range(100):
        if engine.idle:
            break
        proposals = engine.step().proposals
        replies += [(proposal.committed_length == length, session.root_expanded) for proposal in proposals]
    assert (True, True) in replies
    assert (True, False) not in replies
    assert flags or (False, False) in replies


def test_trees_merge(model):
    """The tree is the union of both drafters', each token below a parent once, and no node is sent twice."""
    engine, alone = together(model), standalone(model)
    for one in (engine, alone):
        one.open(request(1, PROMPT))
    sent = [path_hash([token], p.anchor_hash) for o in settle(engine) for p in o.proposals for token in p.tokens[:1]]
    assert len(sent) == len(set(sent))
    settle(alone)
    tree, model_tree = engine.running[1].tree, alone.running[1].tree
    assert CYCLE[0] in children(tree)
    assert set(children(model_tree)) <= set(children(tree))
    for node in range(-1, len(tree)):
        assert len(children(tree, node)) == len(set(children(tree, node)))
    # The model looked below n-grams, too: what they begin, it goes on with in its own way.
    first = next(child for child in tree.root_children if tree.token[child] == CYCLE[0])
    assert len(children(tree, first)) > 1


def test_node_is_sent_again_when_a_later_drafter_raises_its_score():
    frontiers = [Frontier(64, 2e-3, from_parents=parents) for parents in (False, True)]
    session = DraftSession(request(1, PROMPT), TreeLimits(), (), frontiers)
    target = SpeculationTree(np.array(PROMPT))
    expansions = [([10, 11, 12], [-1.0, -3.0, -5.0]), ([10, 11, 13], [-1.05, -0.2, -2.0])]
    sent = []
    for drafter, (tokens, scores) in enumerate(expansions):
        session.grower.add(ROOT, tokens, [-1, -1, -1], scores, drafter)
        proposals = session.proposals()
        sent.append([p.tokens.tolist() for p in proposals])
        for proposal in proposals:
            target.merge(proposal)
    assert sent == [[[10, 11, 12]], [[11, 13]]]
    np.testing.assert_allclose(target.log_score, [-1.0, -0.2, -5.0, -2.0], rtol=1e-6)
    assert session.proposals() == []


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("flags", [{}, SHAPE], ids=["adaptive", "explicit"])
def test_acceptance_is_that_of_the_model_at_least(model, sampling, flags):
    next_logits = torch_logits(model)
    accepted = {}
    for name, engine in (("together", together(model, **flags)), ("alone", standalone(model, **flags))):
        opened = request(1, PROMPT, sampling, max_tokens=500)
        engine.open(opened)
        target = OracleTarget(next_logits, opened)
        for _ in range(12):
            for output in settle(engine):
                target.hear(output)
            engine.receive([], [target.step()])
        assert target.unknown == 0
        accepted[name] = target.accepted
        engine.close(1)
        engine.check()
        assert engine.drafter.prefix.allocator.leased_pages == 0
    assert accepted["together"] >= 0.8 * accepted["alone"] > 0


def test_an_explicit_tree_is_proposed_once_with_the_best_nodes_of_both(model):
    engine, alone = together(model, **SHAPE), standalone(model, **SHAPE)
    tokens = list(PROMPT)
    for one in (engine, alone):
        one.open(request(1, tokens, max_tokens=500))
    for new in ([], [CYCLE[0]], [CYCLE[1], 77], [10]):  # along both trees, and out of them
        if new:
            for one in (engine, alone):
                one.receive([], [commit_of(tokens, new)])
            tokens += new
        (proposal,) = [p for output in settle(engine) for p in output.proposals]
        (model_only,) = [p for output in settle(alone) for p in output.proposals]
        tree = engine.running[1].tree
        assert len(model_only.tokens) == 7
        proposed = SpeculationTree(np.array(tokens))
        proposed.merge(proposal)
        for limits in ((), (3, 2)):  # of targets without the flags, and with them
            best = sorted(tree.path_tokens(i) for i in tree.best_nodes(7, *limits))
            assert len(best) == 7
            assert best == sorted(proposed.path_tokens(i) for i in proposed.best_nodes(7, *limits))
        assert len(proposal.tokens) <= 14
        assert {tree.token[i] for i in tree.root_children} > set(children(alone.running[1].tree)) or new[-1:] != [10]
    engine.close(1)
    engine.check()


def test_commits_teach_how_far_to_trust_ngrams(model):
    """Every text repeats the cycle once, and goes on otherwise than n-grams foretell."""
    engine, rng = together(model, **SHAPE), np.random.default_rng(0)
    chances = []
    for number in range(1, 5):
        tokens = list(PROMPT)
        engine.open(request(number, tokens, max_tokens=500))
        for _ in range(6):
            settle(engine)
            tree = engine.running[number].tree
            chances += [tree.path_score[n] for n in tree.root_children if tree.token[n] == CYCLE[0]]
            new = [int(rng.integers(100, VOCAB)), *CYCLE]  # behind which the cycle begins again, as n-grams know
            engine.receive([], [commit_of(tokens, new, number)])
            tokens += new
        engine.close(number)
    assert np.mean(chances[-4:]) < np.mean(chances[:2]) - 1.0


@pytest.mark.parametrize("flags", [{}, SHAPE], ids=["adaptive", "explicit"])
def test_ngrams_draft_beyond_the_models_context(model, flags):
    engine = together(model, **flags)
    limit = engine.drafter.max_session_tokens
    tokens = (CYCLE * limit)[: limit - 2]
    engine.open(request(1, tokens, max_tokens=4 * limit))
    settle(engine)
    assert set(engine.running) == {1}
    new = (CYCLE * limit)[limit - 2 : limit + 3]
    engine.receive([], [commit_of(tokens, new)])
    assert engine.running == {}
    assert engine.drafter.prefix.allocator.leased_pages == 0
    proposals = [p for output in settle(engine) for p in output.proposals]
    assert proposals
    engine.open(request(2, tokens + new, max_tokens=4 * limit))
    assert [p.session_id for output in settle(engine) for p in output.proposals]
    engine.close(1)
    engine.close(2)
    assert engine.idle


def test_ngrams_draft_while_the_model_has_no_pages(model):
    engine = together(model)
    engine.drafter.prefix = PrefixCache(PageAllocator(7, 16))
    for session_id in (1, 2):
        engine.open(request(session_id, PROMPT, max_tokens=500))
    drafted = {p.session_id for output in settle(engine) for p in output.proposals}
    assert (drafted, set(engine.running)) == ({1, 2}, {1})
    # What the model takes up late, it grows below what is there already.
    engine.close(1)
    settle(engine)
    assert set(engine.running) == {2}
    assert set(engine.running[2].tree.token) - set(CYCLE)
    engine.close(2)
    engine.check()


@pytest.mark.parametrize("flags", [{}, SHAPE], ids=["adaptive", "explicit"])
def test_random_commits(model, flags):
    """Commits along the tree, beside it, and beyond it keep the page tables of both drafters consistent."""
    engine = together(model, speculative_ngram_max_match_window_size=4, **flags)
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, 12, 60).tolist()
    engine.open(request(1, tokens, max_tokens=10_000))
    for turn in range(60):
        for _ in range(int(rng.integers(0, 6))):
            if not engine.idle:
                engine.step()
        tree, new, node = engine.running[1].tree, [], ROOT
        while tree.children_of(node) and rng.random() < 0.8:
            node = int(rng.choice(tree.children_of(node)))
            new.append(tree.token[node])
        new.append(int(rng.integers(4, VOCAB if turn % 3 else 12)))
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        assert engine.running[1].tokens.tolist() == tokens
        engine.check()
    settle(engine)


def test_ngrams_survive_a_flush_of_feature_drafters(model):
    engine = together(model)
    engine.open(request(1, PROMPT))
    settle(engine)
    engine.close(1)
    before = len(engine.drafter.prefix), len(engine.drafters[0].ngrams)
    assert min(before) > 0
    engine.flush(only_fed=True)
    assert (len(engine.drafter.prefix), len(engine.drafters[0].ngrams)) == before


def test_flush_drops_texts_and_keeps_sessions(model):
    engine = together(model)
    engine.open(request(1, PROMPT))
    settle(engine)
    engine.close(1)
    assert len(engine.drafter.prefix) > 0
    engine.open(request(2, PROMPT))
    engine.step()
    engine.flush()
    assert len(engine.drafters[0].ngrams) == 0
    settle(engine)
    engine.receive([], [commit_of(PROMPT, [10, 11], session_id=2)])
    settle(engine)
    assert engine.running[2].tree.root_children
    engine.close(2)
    engine.flush()
    assert len(engine.drafter.prefix) == 0
    engine.check()


def test_unknown_token_ids_repeated_by_ngrams_are_harmless(model):
    """Clients other than the gateway may send any ids; they only affect their own session."""
    engine = together(model)
    engine.open(request(1, [7, 2**32 - 1, 8] * 6))
    engine.open(request(2, [5, 6, 7]))
    settle(engine)
    session = engine.running[1]
    assert any(session.tree.token[node] == 2**32 - 1 for node in session.frontiers[-1].expanded)
    assert engine.running[2].root_expanded
