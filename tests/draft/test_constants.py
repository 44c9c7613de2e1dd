"""What changes with each constant by which a draft service chooses what to expand, and how far it trusts a drafter."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.drafters.on_demand import Pace, Quality
from services.draft.engine.drafter_stats import DrafterStatsRecorder
from services.draft.engine.expansion import ExpansionScheduler
from services.draft.ngrams.base import NgramOptions
from services.draft.ngrams.plain import PlainNgrams
from services.draft.sessions.claims import ClaimModels, Claims
from services.draft.sessions.outbox import ProposalOutbox
from tests.support.constants import constant_tests


def tree_of(*probabilities):
    """A tree whose root has children with these probabilities."""
    tree = SpeculationTree(np.zeros(1, np.uint32))
    for token, probability in enumerate(probabilities):
        tree.add(ROOT, token, math.log(probability))
    return tree


# --- a draft on the target's cores ---


def pace(*, rounds=(), answers=()):
    """Levels that a round's root and the target's step take. rounds, answers: seconds of each."""
    measured, now = Pace(), 0.0
    for seconds in rounds:
        measured.add_round([1], 2, seconds, now)
    for seconds in answers:
        measured.add_round([1], 2, 0.01, now)
        now += seconds
        measured.committed(1, now)
    return measured.levels


def quality(accepted, rejected):
    """Logarithm of a drafter's quality, after commits that accepted a child of the root, and others."""
    measured = Quality()
    for number in range(accepted + rejected):
        session = SimpleNamespace(tree=tree_of(0.6, 0.3))
        measured.add(session, 1, [0] if number < accepted else [])
    return measured.logarithm


DRAFTERS = {
    "on_demand:_EMA_WEIGHT": lambda: pace(rounds=[0.01, 0.02], answers=[0.03]),
    "on_demand:_FIRST_PACE": pace,
    "on_demand:_DECAY": lambda: quality(20, 10),
    "on_demand:_PRIOR_TOKENS": lambda: quality(0, 3),
    "on_demand:_MIN_QUALITY": lambda: quality(0, 500),
    "on_demand:_MAX_SECONDS": lambda: pace(answers=[0.5, 1.5, 3.0, 9.0]),
}

# --- which nodes are expanded ---


class Waiting:
    """A session with leaves of one probability, for `ExpansionScheduler`."""

    def __init__(self, name, probability, leaves=1):
        self.name, self._reach, self._leaves = name, math.log(probability), leaves
        self.frontiers = [SimpleNamespace(rounds_waited=0)]

    def best_leaves(self, count, _):
        return [(self._reach, node) for node in range(min(self._leaves, count))]


def rounds_before_expansion():
    """Rounds that an unlikely leaf waits behind a likely one that is expanded each time."""
    likely, unlikely = Waiting("likely", 0.9), Waiting("unlikely", 0.1)
    scheduler = ExpansionScheduler([SimpleNamespace(held={1: likely, 2: unlikely})])
    for number in range(1000):
        first = scheduler.requests(0)[0].session
        if first is unlikely:
            return number
        first.frontiers[0].rounds_waited = 0
    raise AssertionError("it is never expanded")


def leaves_of_a_session():
    return len(ExpansionScheduler([SimpleNamespace(held={1: Waiting("one", 0.5, leaves=100)})]).requests(0))


def warnings_by_acceptance():
    """Whether a drafter is reported as wrong for the target, by the percentage of expected tokens that are accepted."""
    log, found = logging.getLogger("services.draft.engine.drafter_stats"), []
    with pytest.MonkeyPatch.context() as patch:
        for percent in range(0, 100, 2):
            reported = []
            patch.setattr(log, "warning", lambda *args, reported=reported: reported.append(args))
            DrafterStatsRecorder("NGRAM", promised=1000.0, accepted=10 * percent).check_calibration()
            found.append(bool(reported))
    return found


def tokens_before_judgement():
    """Expected tokens after which a drafter is judged."""
    for promised in range(0, 2000, 50):
        stats = DrafterStatsRecorder("NGRAM", promised=promised, accepted=promised)
        stats.check_calibration()
        if stats.checked:
            return promised
    raise AssertionError("it is never judged")


ENGINE = {
    "expansion:_REQUESTS_PER_SESSION": leaves_of_a_session,
    "expansion:_WAITING_BONUS": rounds_before_expansion,
    "drafter_stats:_MIN_CALIBRATION": warnings_by_acceptance,
    "drafter_stats:_MIN_EXPECTED": tokens_before_judgement,
}

# --- several drafters in one tree ---


def claimed(claims, *, rounds=0, right=0.3, depth=1, models=None):
    """Probabilities of a path's nodes, after rounds in which drafters claimed a token that was right in some.

    claims: by drafter, the token and the probability that it gives it below each node
    """
    tree, draw = SpeculationTree(np.zeros(1, np.uint32)), np.random.default_rng(3)
    all_claims = Claims(tree, models or ClaimModels(2))
    found = []
    for number in range(rounds + 1):
        above, path = ROOT, []
        for level in range(depth):
            for drafter, (token, probability) in enumerate(claims):
                node = tree.add(above, token + level, 0.0)
                node = tree.path_of([*(tree.token[one] for one in path), token + level])[-1] if node is None else node
                all_claims.added([above], [node], [math.log(probability)], drafter)
            path.append(tree.path_of([claims[0][0] + one for one in range(level + 1)])[-1])
            above = path[-1]
        found = [round(math.exp(tree.log_score[node]), 9) for node in path]
        if number < rounds:
            wrong = [level for level in range(depth) if draw.random() >= right ** (1 + level / 4)]
            tokens = [claims[0][0] + level for level in range(min(wrong, default=depth))] + [999]
            all_claims.learn(tokens, tree.path_of(tokens))
            tree.clear()
            all_claims.clear()
    return found


AGREED, CONTESTED = [(10, 0.6), (10, 0.5)], [(10, 0.6), (20, 0.5)]


def renewed_session(second_right):
    """A session's claims, after another session of the same kind taught its own."""
    models = ClaimModels(2)
    claimed(AGREED, rounds=40, right=0.9, models=models)
    return claimed(AGREED, rounds=40, right=second_right, models=models)


def resent_scores():
    """Whether a node is sent again, by how much its score rises, in hundredths."""
    found = []
    for hundredth in range(1, 40):
        tree = tree_of(0.2)
        outbox = ProposalOutbox(1, tree)
        outbox.take(range(1), -math.inf, 9)
        tree.rescore({0: tree.log_score[0] + hundredth / 100})
        found.append(bool(outbox.take(range(1), -math.inf, 9)))
    return found


SESSIONS = {
    "claims:_MAX_LOGIT": lambda: claimed([(10, 1.0), (10, 0.5)]),
    "claims:_DEPTHS": lambda: claimed(AGREED, rounds=60, right=0.97, depth=14),
    "claims:_DECAY": lambda: renewed_session(0.1),
    "claims:_SESSION_DECAY": lambda: claimed(AGREED, rounds=200),
    "claims:_SPREADS": lambda: claimed(AGREED, rounds=20),
    "claims:_SESSION_SPREAD": lambda: claimed(AGREED, rounds=20),
    "claims:_LEAST_VARIANCE": lambda: claimed([(10, 0.99), (10, 0.99)], rounds=20, right=0.99),
    "claims:_AGREEMENT": lambda: claimed(AGREED),
    "claims:_SILENCE": lambda: claimed(CONTESTED),
    "outbox:_MIN_CHANGE": resent_scores,
}

# --- n-grams ---


def trained(*, hits, misses):
    """Accuracy of a match of two tokens that was right, and then wrong, some times."""
    ngrams = PlainNgrams(NgramOptions())
    ngrams.insert(np.array([5, 6, 7, 8], np.uint32))
    for number in range(hits + misses):
        token = 7 if number < hits else 90
        ngrams.commit(np.array([3, 5, 6, token], np.uint32), 1, noisy=False, keep=False)
    return ngrams.accuracy(2, noisy=False)


def children_with_noise():
    """Nodes that are proposed to a sampled session where many tokens followed."""
    ngrams = PlainNgrams(NgramOptions(match_type="PROB", max_bfs_breadth=100, draft_token_num=200))
    for token in range(100, 200):
        ngrams.insert(np.array([5, 6, token, 7], np.uint32))
    keys = np.ones((30, 2), np.uint32)
    return len(ngrams.look_up(np.array([5, 6], np.uint32), keys).tokens)


def frequent_child():
    """Whether the most frequent continuation is found behind more recent ones, by their number."""
    found = []
    for others in (300, 700, 1500, 3000):
        ngrams = PlainNgrams(NgramOptions(match_type="PROB", draft_token_num=2, max_bfs_breadth=1))
        for _ in range(3):
            ngrams.insert(np.array([5, 6, 99, 7], np.uint32))
        for token in range(1000, 1000 + others):
            ngrams.insert(np.array([5, 6, token, 7], np.uint32))
        found.append(99 in ngrams.look_up(np.array([5, 6], np.uint32), None).tokens)
    return found


NGRAMS = {
    "base:POOL": children_with_noise,
    "base:COUNTED": frequent_child,
    "base:PRIOR_WEIGHT": lambda: trained(hits=3, misses=0),
    "base:FADING": lambda: trained(hits=200, misses=100),
}

ALL = {
    "services.draft.drafters": DRAFTERS,
    "services.draft.engine": ENGINE,
    "services.draft.sessions": SESSIONS,
    "services.draft.ngrams": NGRAMS,
}
FIXED = {
    "services.draft.drafters": {
        "on_demand:ROUNDS": "the size of a compiled program",
        "on_demand:_SHAPES": "sizes of compiled programs",
    },
    "services.draft.sessions": {
        "claims:_LEAST": "keeps a logarithm finite",
        **{f"claims:{name}": "names a case" for name in ("_UNKNOWN", "_SILENT", "_CLAIMS")},
    },
    "services.draft.ngrams": {"base:NO_NAMESPACE": "no token is as large"},
}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(ALL, FIXED)
