"""Several drafters in one tree: what each claims of a node, and the probability that follows from all claims.

A claim is the probability that a drafter gives a node, given its parent. Claims of two drafters cannot be compared: a
match of n-grams is right in one text and useless in another, and a head's certainty fades with depth. Every commit
shows which claims along the committed path were right, whether their nodes were verified or not. From them a model of
two levels learns how far to trust a claim, alone and beside the other drafters':

    calibrated    logit = a + b logit(claim) + c depth, for each drafter by itself
    combined      logit = w + sum of w_d calibrated_d, with weights for each pattern: which drafters claim the node,
                  which propose other tokens in its place, and which have not expanded its parent

So two drafters that agree make a token likelier than either of them, and one that is silent makes it less likely. What
is learnt holds for all sessions; each session adds a shift of each pattern that its own text has taught.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import NamedTuple

from outrider.speculation.tree import ROOT, SpeculationTree

_MAX_LOGIT = 7.0  # of a claim: beyond it a drafter counts as no surer
_DEPTHS = 6  # levels that count; deeper nodes count as this deep
_DECAY = 0.9998  # of evidence of all sessions, per node
_SESSION_DECAY = 0.995  # the same of a session, per node: its text changes sooner
_SPREADS = (0.5, 0.25, 0.15)  # how far a constant, a weight and the slope of depth are expected to move
_SESSION_SPREAD = 0.7  # the same of a session's shift, in logits
_LEAST = 1e-9  # probability of a node
_LEAST_VARIANCE = 0.1  # of an outcome: one surprise among many likely outcomes is no turn
# Before any evidence a node has the mean log-odds of its claims, more for each further drafter that claims it, and less
# for each that proposes other tokens.
_AGREEMENT, _SILENCE = 0.7, 0.7
_UNKNOWN, _SILENT, _CLAIMS = range(3)  # what a drafter does at a node


class OnlineLogit:
    """A logistic model that learns online, by Newton steps on the diagonal. weights: of the inputs."""

    def __init__(self, weights: Sequence[float], spreads: Sequence[float], decay: float) -> None:
        """weights: before any evidence; spreads: how far evidence is expected to move each; decay: of the evidence."""
        self.weights = list(weights)
        self._least = [1.0 / (spread * spread) for spread in spreads]
        self._information = list(self._least)
        self._decay = decay

    def logit(self, inputs: Sequence[float]) -> float:
        """Of the outcome."""
        logit: float = sum(map(mul, self.weights, inputs))
        return logit

    def learn(self, inputs: Sequence[float], error: float, variance: float) -> None:
        """error: outcome minus expected probability; variance: of the outcome."""
        for i, value in enumerate(inputs):
            if value:
                more = self._information[i] * self._decay + variance * value * value
                self._information[i] = max(more, self._least[i])
                self.weights[i] += error * value / self._information[i]


class _Verdict(NamedTuple):
    """A node's probability. pattern: see the module; calibrated: a constant and the calibrated claims, in logits;

    shared: the logit of all sessions; logit: that of this session
    """

    pattern: int
    calibrated: list[float]
    shared: float
    logit: float


@dataclass
class ClaimModels:
    """What all sessions of one kind have taught. calibrations: by drafter; combinations: by pattern."""

    drafters: int
    calibrations: list[OnlineLogit] = field(init=False)
    combinations: dict[int, OnlineLogit] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.calibrations = [OnlineLogit((0.0, 1.0, 0.0), _SPREADS, _DECAY) for _ in range(self.drafters)]

    def combination(self, pattern: int, claiming: int) -> OnlineLogit:
        """The model of a pattern in which some drafters claim the node."""
        found = self.combinations.get(pattern)
        if found is None:
            silent = sum(pattern // 3**place % 3 == _SILENT for place in range(self.drafters))
            constant = _AGREEMENT * (claiming - 1) - _SILENCE * silent
            spreads = (_SPREADS[0], *[_SPREADS[1]] * claiming)
            found = OnlineLogit((constant, *[1.0 / claiming] * claiming), spreads, _DECAY)
            self.combinations[pattern] = found
        return found


class Claims:
    """The claims on the nodes of one session's tree.

    Nodes are those of the tree, by index; it must call `added`, `renumber` and `clear` as it changes.
    """

    def __init__(self, tree: SpeculationTree, models: ClaimModels) -> None:
        self._tree, self._models = tree, models
        self._shifts: dict[int, OnlineLogit] = {}  # by pattern, of this session
        self._logits: list[list[float]] = [[] for _ in range(models.drafters)]  # by drafter and node; NaN without claim

    def clear(self) -> None:
        """The tree was emptied."""
        for own in self._logits:
            own.clear()

    def renumber(self, kept: Sequence[int]) -> None:
        """The tree has only these nodes, in this order."""
        self._logits = [[own[node] for node in kept] for own in self._logits]

    def added(self, parents: Sequence[int], nodes: Sequence[int], log_scores: Sequence[float], drafter: int) -> None:
        """A drafter proposes some nodes, which may be known. parents: theirs, or ROOT."""
        for claims in self._logits:
            claims.extend([math.nan] * (len(self._tree) - len(claims)))
        own = self._logits[drafter]  # the main drafter is the last, or -1
        for node, score in zip(nodes, log_scores, strict=True):
            logit = _logit_of(score)
            if not own[node] >= logit:  # also where it is NaN
                own[node] = logit
        scores: dict[int, float] = {}
        for parent in dict.fromkeys(parents):
            children = self._tree.children_of(parent)
            chances = [_probability(verdict.logit) for verdict in self._verdicts(children)]
            excess = max(sum(chances), 1.0)  # they exclude one another
            for child, chance in zip(children, chances, strict=True):
                scores[child] = math.log(max(chance / excess, _LEAST))
        self._tree.rescore(scores)

    def _verdicts(self, children: Sequence[int]) -> list[_Verdict]:
        """Of all children of a node."""
        if not children:
            return []
        models, below = self._models, float(min(self._tree.depth[children[0]], _DEPTHS) - 1)
        claims: list[tuple[list[float], float, float, int]] = []  # by drafter: claims, calibration, what silence says
        for own, calibration in zip(self._logits, models.calibrations, strict=True):
            constant, slope, fading = calibration.weights
            known = any(own[child] == own[child] for child in children)
            claims.append((own, constant + fading * below, slope, _SILENT if known else _UNKNOWN))
        found = []
        for child in children:
            pattern, calibrated = 0, [1.0]
            for own, constant, slope, silence in claims:
                claim = own[child]
                if claim == claim:
                    pattern = 3 * pattern + _CLAIMS
                    calibrated.append(constant + slope * claim)
                else:
                    pattern = 3 * pattern + silence
            shared = models.combination(pattern, len(calibrated) - 1).logit(calibrated)
            shift = self._shifts.get(pattern)
            found.append(_Verdict(pattern, calibrated, shared, shared if shift is None else shared + shift.weights[0]))
        return found

    def learn(self, tokens: Sequence[int], path: Sequence[int]) -> None:
        """Learn from a commit, before the tree follows it. tokens: committed; path: the nodes among them."""
        tree = self._tree
        for parent, token in zip((ROOT, *path), tokens, strict=False):
            children = tree.children_of(parent)
            for child, verdict in zip(children, self._verdicts(children), strict=True):
                self._learn(child, verdict, float(tree.token[child] == token))

    def _learn(self, node: int, verdict: _Verdict, outcome: float) -> None:
        models, below = self._models, float(min(self._tree.depth[node], _DEPTHS) - 1)
        values = iter(verdict.calibrated[1:])
        alone = _CLAIMS * 3 ** (models.drafters - 1)  # the pattern of a drafter before others have expanded the parent
        for own, calibration in zip(self._logits, models.calibrations, strict=True):
            if own[node] == own[node]:
                value = next(values)
                _teach(calibration, (1.0, own[node], below), outcome, value)
                if alone != verdict.pattern:  # nodes are scored, and may be sent, as soon as one drafter proposes them
                    combination, inputs = models.combination(alone, 1), (1.0, value)
                    _teach(combination, inputs, outcome, combination.logit(inputs))
            alone //= 3
        combination = models.combination(verdict.pattern, len(verdict.calibrated) - 1)
        _teach(combination, verdict.calibrated, outcome, verdict.shared)
        shift = self._shifts.get(verdict.pattern)
        if shift is None:
            shift = self._shifts[verdict.pattern] = OnlineLogit((0.0,), (_SESSION_SPREAD,), _SESSION_DECAY)
        _teach(shift, (1.0,), outcome, verdict.logit)


def _teach(model: OnlineLogit, inputs: Sequence[float], outcome: float, logit: float) -> None:
    chance = _probability(logit)
    model.learn(inputs, outcome - chance, max(chance * (1.0 - chance), _LEAST_VARIANCE))


def _logit_of(log_score: float) -> float:
    """Log-odds of a log-probability, bounded."""
    rest = -math.expm1(min(log_score, 0.0))
    if rest <= 0.0:
        return _MAX_LOGIT
    return min(max(log_score - math.log(rest), -_MAX_LOGIT), _MAX_LOGIT)


def _probability(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -30.0 else 0.0
