"""Many sessions on one drafter: the likeliest nodes first, without starvation; calibration of a wrong pair."""

import logging
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.speculation.proposal import Commit, path_hash
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Drafter, Expansion
from services.draft.engine import drafter_stats
from services.draft.engine.engine import DraftEngine
from services.draft.sessions.frontier import TreeLimits
from tests.support.draft.helpers import OracleTarget, request, settle, standalone, torch_logits
from tests.support.tiny import VOCAB, write_model

LIMITS = TreeLimits()


class SlowDrafter(Drafter):
    """Expands the first requests of a round, up to a number, with random children."""

    name = "SLOW"

    def __init__(self, rng, grants=1):
        self.rng, self.grants = rng, grants
        self.granted = []

    def open(self, session):
        pass

    def close(self, session):
        pass

    def did_commit(self, session, kept):
        pass

    def will_commit(self, session, count, path):
        return False

    def warm_up(self):
        pass

    def expand(self, requests):
        self.granted = [(request.session.id, request.node) for request in requests[: self.grants]]
        return [
            Expansion(session, node, [1, 2, 3], [-1, -1, -1], np.log(self.rng.dirichlet([0.3, 0.3, 0.3]) + 1e-9))
            for session, node, _ in requests[: self.grants]
        ]


def longest_waits(engine, rng, sessions, rounds, chance):
    """Longest waits in rounds, of roots and of sessions with any leaf; sessions commit at random."""
    tokens = {i: [5, 6, i + 7] for i in range(sessions)}
    for i, own in tokens.items():
        engine.open(request(i, own, max_tokens=100_000))
    roots, any_wish = dict.fromkeys(tokens, 0), dict.fromkeys(tokens, 0)
    worst_root = worst = 0
    for _ in range(rounds):
        for i, own in tokens.items():
            if rng.random() < chance(i):
                new = int(rng.integers(1, 9))
                engine.receive([], [Commit(i, len(own), np.array([new], np.uint32), path_hash(np.array([*own, new])))])
                own.append(new)
        requests = {i: engine.running[i].best_leaves(1) for i in tokens}
        engine.step()
        served = {session_id for session_id, _ in engine.drafter.granted}
        for i, own in requests.items():
            any_wish[i] = any_wish[i] + 1 if own and i not in served else 0
            roots[i] = roots[i] + 1 if own and own[0][1] == ROOT and i not in served else 0
        worst_root, worst = max(worst_root, *roots.values()), max(worst, *any_wish.values())
    return worst_root, worst


@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 3))
def test_no_session_starves(seed, sessions, grants):
    """With N sessions and g expansions a round a root waits at most N / g rounds, a leaf until it counts as a root."""
    rng = np.random.default_rng(seed)
    engine = DraftEngine(SlowDrafter(rng, grants), LIMITS, 64)
    busy = rng.random(sessions) * rng.random()
    root, wait = longest_waits(engine, rng, sessions, 150, lambda i: busy[i])
    until_root = -LIMITS.log_floor / 0.1
    assert root <= sessions + 1
    assert wait <= until_root + sessions + 1


@given(st.integers(0, 2**32 - 1))
def test_the_likeliest_nodes_come_first(seed):
    """Among requests that have waited equally long, likelier ones are expanded first, over all sessions."""
    rng = np.random.default_rng(seed)
    engine = DraftEngine(SlowDrafter(rng, 2), LIMITS, 64)
    for i in range(4):
        engine.open(request(i, [5, 6, i + 7], max_tokens=1000))
    for _ in range(30):
        for session in engine.running.values():
            session.frontiers[-1].rounds_waited = 0
        reach = {(i, node): score for i, s in engine.running.items() for score, node in s.best_leaves(99)}
        engine.step()
        granted = engine.drafter.granted
        left = [score for request, score in reach.items() if request not in granted]
        assert min(reach[request] for request in granted) >= max(left, default=-math.inf)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("draft"))


def test_cheap_single_session_rounds_starve_no_session(model):
    """Where rounds of one session are cheapest, a session that commits constantly does not keep others waiting."""
    engine = standalone(model, max_running_requests=6, draft_max_total_tokens=4096)
    engine.drafter.runner.cost = lambda shape: float(shape.sessions * shape.rows)
    tokens = {i: [5, 6, i + 7] for i in range(6)}
    for i, own in tokens.items():
        engine.open(request(i, own, max_tokens=400))
    waiting = dict.fromkeys(tokens, 0)
    for turn in range(60):
        engine.step()
        for i, session in engine.running.items():
            waiting[i] = 0 if session.root_expanded else waiting[i] + 1
        assert max(waiting.values()) <= 12
        for i, own in tokens.items():
            if i == 0 or turn % 7 == i:
                engine.receive([], [Commit(i, len(own), np.array([9], np.uint32), path_hash(np.array([*own, 9])))])
                own.append(9)


def test_gateways_share_a_draft(model):
    """Sessions of several gateways, whose ids differ in their high halves, are served alike and closed separately."""
    engine = standalone(model)
    ids = [gateway << 32 | i for gateway in (1, 7) for i in range(2)]
    for session_id in ids:
        engine.open(request(session_id, [5, 6, 7]))
    assert {p.session_id for output in settle(engine) for p in output.proposals} == set(ids)
    for session_id in ids[:2]:
        engine.close(session_id)
    for session_id in ids[2:]:
        commit = Commit(session_id, 3, np.array([9], np.uint32), path_hash(np.array([5, 6, 7, 9])))
        engine.receive([], [commit])
    assert {p.session_id for output in settle(engine) for p in output.proposals} == set(ids[2:])


# --- promises ---


def test_wrong_pair_is_logged_once(model, tmp_path, caplog, monkeypatch):
    """Draft tokens of a draft for another model are rejected; those of the target's own model are accepted."""
    monkeypatch.setattr(drafter_stats, "_MIN_EXPECTED", 30.0)
    other = torch_logits(write_model(tmp_path / "other", seed=9))
    for next_logits, warns in ((torch_logits(model), False), (other, True)):
        engine = standalone(model)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            opened = request(1, np.random.default_rng(0).integers(4, VOCAB, 8).tolist(), max_tokens=100_000)
            target = OracleTarget(next_logits, opened)
            engine.open(opened)
            while engine.stats[0].promised < 40:
                for output in settle(engine):
                    target.hear(output)
                engine.receive([], [target.step()])
        (load,) = engine.load().drafters
        assert load.name == "STANDALONE"
        assert load.accepted <= load.chances <= load.offered
        kept = load.accepted / load.promised
        assert (kept < 0.15) == warns, kept
        assert len([r for r in caplog.records if "seem to be a wrong pair" in r.message]) == warns
