"""Simulated acceptance, to measure the system with a random head: no flag of a service enables it.

The drafter computes everything as always. Then, among the candidates that it hands to the engine, the first one is
replaced by the token that the target will sample, with a probability p at each position, or kept wrong. A position has
one outcome, however often it is drafted. Candidates claim these probabilities, as those of a calibrated drafter do,
also below a wrong token, so that the target verifies as many useless tokens as with a real head.

SGLang and llama.cpp simulate accept lengths, too, but in the verification; here the target verifies as always.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from bench.gpu.system.continuation import Continuation
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import ExpandRequest, Expansion
from services.draft.drafters.model import ModelDrafter
from services.draft.sessions.session import DraftSession

_SIBLING = math.log(1e-3)  # the claims of candidates that are never right, relative to what the first one leaves
_FAR = 1000  # at least so many tokens of the text lie between a token and the one that replaces it as a wrong one
_MASK = (1 << 64) - 1


def acceptance_of(accept_length: float, depth: int) -> float:
    """The probability a position that gives a mean accept length with chains of `depth` draft tokens.

    Raises ValueError for an accept length below 1, or not below depth + 1.
    """
    if not 1 <= accept_length < depth + 1:
        raise ValueError(f"an accept length of {accept_length:g} does not lie between 1 and the tree's {depth} + 1")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(depth + 1)) < accept_length else (low, middle)
    return low


class SimulatedAcceptance:
    """Replaces candidates of one drafter. A request chooses its accept length by its seed."""

    def __init__(self, text: Continuation, accept_lengths: Sequence[float], depth: int) -> None:
        """accept_lengths: seed s has the one at index s modulo their number. depth: of the trees."""
        self._text = text
        self._table = [acceptance_of(length, depth) for length in accept_lengths]
        # Coprime to the text's size, so that repeated steps reach every token of it.
        self._far = next(step for step in itertools.count(_FAR) if math.gcd(step, text.size) == 1)

    def attach(self, drafter: ModelDrafter) -> None:
        """Replace the candidates of all later expansions of a drafter, however unlikely its random head finds them."""
        drafter.executor.min_edge = -math.inf
        compute = drafter.expand

        def expand(requests: Sequence[ExpandRequest]) -> list[Expansion]:
            return [self.replaced(expansion) for expansion in compute(requests)]

        vars(drafter)["expand"] = expand

    def replaced(self, expansion: Expansion) -> Expansion:
        """An expansion with simulated tokens and claims; its size stays."""
        if not len(expansion.tokens):
            return expansion
        return self._children(expansion) if not (expansion.whole or expansion.places) else self._grown(expansion)

    def _children(self, expansion: Expansion) -> Expansion:
        session, node = expansion.session, expansion.node
        depth = 0 if node == ROOT else session.tree.depth[node]
        tokens = list(expansion.tokens)
        if self._is_right(session, node):
            right = self._text.after(int(session.tokens[-1]), depth + 1)
            taken = {right}
            first = right if self._accepted(session, depth) else self._wrong(tokens[0], taken)
            tokens = [first, *(self._wrong(token, taken | {first}) for token in tokens[1:])]
        return expansion._replace(tokens=tokens, log_scores=self._claims(session, len(tokens)))

    def _grown(self, expansion: Expansion) -> Expansion:
        """What one program grew, with the same number of nodes: a chain, and candidates beside it.

        Where nodes keep their rows for further growth, those of the chain do, without its last one.
        """
        session, tokens = expansion.session, list(expansion.tokens)
        chain = self._levels(expansion)
        right, root = True, int(session.tokens[-1])
        for depth in range(chain):
            token = self._text.after(root, depth + 1)
            right = right and self._accepted(session, depth)
            tokens[depth] = token if right else self._wrong(tokens[depth], {token})
        beside: list[set[int]] = [{tokens[depth], self._text.after(root, depth + 1)} for depth in range(chain)]
        for i in range(chain, len(tokens)):
            siblings = beside[i % chain]
            tokens[i] = self._wrong(tokens[i], siblings)
            siblings.add(tokens[i])
        parents = [i - 1 for i in range(chain)] + [i % chain - 1 for i in range(chain, len(tokens))]
        first, *others = self._claims(session, len(tokens) - chain + 1)
        places = sorted(place for place in expansion.places if place >= 0)[: chain - 1]
        if expansion.places:
            places += [-1] * (len(tokens) - len(places))
        return expansion._replace(tokens=tokens, parents=parents, log_scores=[first] * chain + others, places=places)

    def _levels(self, expansion: Expansion) -> int:
        """Length of the chain: of an explicit tree its steps, of another one as deep as it has grown."""
        shape = expansion.session.grower.limits.shape
        if shape is not None:
            return min(len(expansion.tokens), shape.steps)
        depths: list[int] = []
        for parent in expansion.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths)

    def _is_right(self, session: DraftSession, node: int) -> bool:
        """True if a node's path is the target's text."""
        tree, root = session.tree, int(session.tokens[-1])
        while node != ROOT:
            if tree.token[node] != self._text.after(root, tree.depth[node]):
                return False
            node = tree.parent[node]
        return True

    def _wrong(self, token: int, taken: set[int]) -> int:
        """A token that is not among `taken`: the drafted one, if possible."""
        while token in taken:
            token = self._text.after(token, self._far)
        return token

    def _probability(self, session: DraftSession) -> float:
        return self._table[session.sampling.seed % len(self._table)]

    def _accepted(self, session: DraftSession, depth: int) -> bool:
        """The outcome of a position. depth: of the node above it."""
        first, position = int(session.tokens[0]), session.length + depth
        return _uniform(first << 32 | position) < self._probability(session)

    def _claims(self, session: DraftSession, count: int) -> list[float]:
        probability = self._probability(session)
        first = math.log(max(probability, 1e-9))
        rest = math.log(max(1 - probability, 1e-9)) + _SIBLING
        return [first, *(rest - i for i in range(count - 1))]


def _uniform(number: int) -> float:
    """A number in [0, 1), by SplitMix64."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return ((x ^ x >> 31) >> 11) / (1 << 53)
