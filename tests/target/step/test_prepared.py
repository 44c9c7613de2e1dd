"""A prepared step: what the device chooses is what the host would choose if it had read the samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.acceptance import accepted_path
from outrider.speculation.noise import position_keys
from outrider.speculation.tree import ROOT, SpeculationTree
from services.target.engine.launching.in_flight import expecting
from services.target.engine.launching.prepare import prepare
from services.target.kernels.cuda.ragged import ancestor_words
from services.target.sampling import compaction
from services.target.speculation.survivors import expected_gains, tree_tables
from services.target.step.batch import build
from services.target.step.prepared import MAX_NODES, resolve
from tests.support.target.driving import random_tree
from tests.support.target.prepared import CPU, TOKENS, Case, known_works, prepared_batch, real_rows

cases = given(st.integers(0, 2**32), st.integers(1, 5))


@cases
def test_the_device_chooses_what_the_host_would(seed, sessions):
    case = Case(seed, sessions)
    assert max(len(tree) for tree in case.trees) <= MAX_NODES
    found = resolve(np.concatenate(case.samples), case.tables)
    for one, span in enumerate(found):
        path, bonus = case.taken(one)
        length = case.trees[one].length
        assert (span.accepted, span.bonus) == (len(path), bonus)
        assert span.position == length + len(path)
        expected = case.followed(one)
        for column in ("tokens", "parents", "depths"):
            assert getattr(span.draft, column).tolist() == getattr(expected, column).tolist()
        np.testing.assert_allclose(span.draft.path_scores, expected.path_scores, atol=1e-5)


@cases
def test_rows_slots_and_masks_are_those_of_the_known_batch(seed, sessions):
    case = Case(seed, sessions).go_on()
    batch, settled, prepared, works = prepared_batch(case)
    known = known_works(case)
    real, nodes = real_rows(works, known)
    expected = build(known, CPU)
    for column in ("ids", "positions"):
        assert getattr(settled.rows, column)[real].tolist() == getattr(expected.rows, column).tolist()
    assert settled.layout.slots[real].tolist() == expected.layout.slots.tolist()
    assert settled.layout.start.tolist() == expected.layout.start.tolist()
    assert settled.layout.parents[nodes].tolist() == expected.layout.parents.tolist()
    words = torch.from_numpy(ancestor_words(batch.layout.parents, batch.layout.nodes, 2))
    prepared.words(words)
    assert (
        words[torch.from_numpy(nodes)].tolist()
        == ancestor_words(expected.layout.parents, expected.layout.nodes, 2).tolist()
    )
    assert not words[:, 1].any()
    keys = torch.zeros(len(real), 2, dtype=torch.int64)
    prepared.keys(keys)
    row = 0
    for work in known:
        session = work.chunk.session
        positions = session.length + np.array([0, *work.draft.depths])
        if not session.sampling.greedy:
            own = keys[torch.from_numpy(real)][row : row + len(positions)]
            assert own.tolist() == position_keys(session.sampling.seed, positions).tolist()
        row += len(positions)


@cases
def test_accepted_rows_of_a_prepared_step_move_as_those_of_a_known_one(seed, sessions):
    case = Case(seed, sessions)
    if not case.tables.width:
        return
    _, settled, prepared, works = prepared_batch(case)
    samples = case.rng.integers(0, TOKENS, settled.sample_count)
    spans = resolve(np.concatenate(case.samples), case.tables)
    first, expected = 0, np.zeros((2, sessions, case.tables.width), np.int64)
    for one, (work, span) in enumerate(zip(works, spans, strict=True)):
        own = samples[first : first + len(work.draft) + 1]
        for place, (parent, token) in enumerate(zip(span.draft.parents, span.draft.tokens, strict=True)):
            if case.rng.random() < 0.7:
                own[parent + 1] = token
            assert place >= parent
        path, _ = accepted_path(span.draft, own)
        slots = work.chunk.session.table.slots(span.position + 1, span.position + 1 + len(span.draft))
        expected[0, one, : len(path)], expected[1, one, : len(path)] = slots[path], slots[: len(path)]
        first += len(work.draft) + 1
    moves = compaction.of_spans(prepared, settled.sample_count).moves(torch.from_numpy(samples))
    assert moves.tolist() == expected.tolist()


@cases
def test_gains_count_what_survives_below_each_possible_bonus_token(seed, sessions):
    case = Case(seed, sessions)
    for one, gains in enumerate(expected_gains(case.tables, 20)):
        tree, verified = case.trees[one], set(case.trees[one].find(case.drafts[one]))
        places = np.zeros(64)
        for node in range(len(tree)):
            if node in verified or (tree.parent[node] != ROOT and tree.parent[node] not in verified):
                continue
            below = {node}
            for other in range(node + 1, len(tree)):
                if tree.parent[other] in below:
                    below.add(other)
            scores = sorted((tree.path_score[other] for other in below - {node}), reverse=True)
            places[: len(scores)] += np.exp(scores)
        np.testing.assert_allclose(np.exp(gains.path_scores), places[: len(gains)], rtol=1e-4)
        assert not places[len(gains) : 20].any()


def test_large_trees_keep_what_is_verified_and_the_best_of_the_rest():
    tree = SpeculationTree(np.array([1, 2]), capacity=256)
    rng = np.random.default_rng(0)
    while len(tree) < 180:
        tree.merge(random_tree(rng, 1, [1, 2], 50, 100))
    node = ROOT
    for token in range(55):  # likelier than all others
        node = tree.add(node, 60 + token, 0.0)
    draft = tree.select(15, 4)
    tables = tree_tables([tree], [draft], [0], [1000])
    tables.sessions[3] = 15
    assert (tables.nodes[0, 0] >= 0).all()
    assert (tables.nodes[3, 0, :15] == np.arange(1, 16)).all()
    parents = tables.nodes[1, 0]
    assert ((parents == MAX_NODES) | (parents < np.arange(MAX_NODES))).all()


def test_nothing_waits_for_the_device():
    """On the meta device an operation that needs the samples raises."""
    case = Case(3, 4)
    batch, _, _, works = prepared_batch(case)
    with expecting(case.sessions):
        samples = torch.empty(sum(map(len, case.samples)), dtype=torch.int64, device="meta")
        there = replace(batch, device=torch.device("meta"))
        there, prepared = prepare(there, works, case.sessions, samples, case.tables, follows=True)
    assert there.prepared is prepared
    assert there.ids.device.type == "meta"
    assert compaction.of_spans(prepared, there.sample_count).moves(there.sampled).device.type == "meta"
    with pytest.raises(RuntimeError, match="meta"):
        int(prepared.spans.bonus[0])
