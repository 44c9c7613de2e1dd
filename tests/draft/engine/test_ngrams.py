"""The draft engine over n-grams, where everything can be computed by hand."""

from dataclasses import replace

import numpy as np

from outrider.speculation.proposal import path_hash
from outrider.speculation.sampling import SamplingParams
from outrider.speculation.tree import SpeculationTree
from tests.support.draft.helpers import (
    commit_of,
    ngram,
    request,
    settle,
    standalone,
)
from tests.support.draft.prompts import PROMPT
from tests.support.tiny import write_model


def test_paused_session_costs_nothing_until_it_resumes(tmp_path):
    engine = standalone(write_model(tmp_path / "model"))
    engine.open(replace(request(1, PROMPT), drafting_paused=True))
    assert engine.idle
    engine.receive([], [replace(commit_of(PROMPT, [9]), draft_budget=0)])
    assert engine.idle
    assert engine.drafter.prefix_kvs[1].settled == 0
    engine.receive([], [commit_of([*PROMPT, 9], [10])])
    assert any(output.proposals for output in settle(engine))
    assert engine.drafter.prefix_kvs[1].settled == len(PROMPT) + 2


def test_commit_without_tokens_pauses_drafting(tmp_path):
    engine = standalone(write_model(tmp_path / "model"))
    engine.open(request(1, PROMPT))
    assert not engine.idle
    engine.receive([], [replace(commit_of(PROMPT, []), draft_budget=0)])
    assert engine.idle
    engine.receive([], [replace(commit_of(PROMPT, [9]), draft_budget=0)])
    assert engine.idle
    assert engine.drafter.prefix_kvs[1].settled == 0
    engine.receive([], [commit_of([*PROMPT, 9], [10])])
    assert any(output.proposals for output in settle(engine))
    assert engine.drafter.prefix_kvs[1].settled == len(PROMPT) + 2


CYCLE = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


def test_ngram_copies_from_the_prompt_and_drafts_ahead():
    engine = ngram()
    tokens = [*CYCLE * 3, 10, 11]
    engine.open(request(1, tokens))
    tree = SpeculationTree(np.array(tokens))
    for output in settle(engine):
        for proposal in output.proposals:
            assert tree.merge(proposal) == len(proposal.tokens)
    best = max(range(len(tree)), key=lambda node: tree.depth[node])
    # One lookup goes 11 nodes deep at most; looking leaves up again reaches the depth limit.
    assert tree.path_tokens(best) == [*CYCLE[2:], *CYCLE][:16]


def test_ngram_learns_across_sessions_and_from_commits():
    engine = ngram(speculative_ngram_insert_prompts=False)
    engine.open(request(1, [1, 2, 3]))
    engine.open(request(2, [7, 8]))
    assert [o.proposals for o in settle(engine)] == [[]]
    engine.receive([], [commit_of([7, 8], [1, 2, 3, 55, 56], session_id=2)])
    engine.receive([], [commit_of([1, 2, 3], [1, 2, 3])])
    proposal = next(p for output in settle(engine) for p in output.proposals if p.session_id == 1)
    assert (proposal.anchor_length, proposal.anchor_hash) == (6, path_hash(np.array([1, 2, 3, 1, 2, 3])))
    assert 55 in proposal.tokens
    assert 56 in proposal.tokens


def test_ngram_ranks_by_noise_where_the_session_samples():
    stored = [token for last in range(50, 58) for token in (1, 2, last)]
    firsts = {}
    for seed in range(12):
        engine = ngram()
        engine.open(request(1, [*stored, 1, 2], SamplingParams(1.0, seed=seed)))
        proposals = [p for output in settle(engine) for p in output.proposals]
        firsts[seed] = proposals[0].tokens[0]
    assert len(set(firsts.values())) > 3


def test_nodes_are_sent_once_and_parents_first():
    engine = ngram()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, 300).tolist()
    engine.open(request(1, tokens, max_tokens=200))
    seen = {path_hash(np.array(tokens[:n])) for n in range(1, len(tokens) + 1)}
    for _ in range(20):
        for output in settle(engine):
            for proposal in output.proposals:
                assert proposal.anchor_hash in seen
                hashes = [proposal.anchor_hash]
                for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
                    assert -1 <= parent < len(hashes) - 1
                    hashes.append(path_hash([token], hashes[parent + 1]))
                assert not seen & set(hashes[1:])
                seen |= set(hashes)
        new = rng.integers(0, 4, 3).tolist()
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        seen.add(path_hash(np.array(tokens)))
        seen.add(path_hash(np.array(tokens[:-1])))
        seen.add(path_hash(np.array(tokens[:-2])))
