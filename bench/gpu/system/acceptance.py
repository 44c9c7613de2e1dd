"""Simulated acceptance, to measure the system with a random head: no flag of a service enables it.

The drafter computes everything as always. Then the trees that it hands to the engine become those of a head whose
candidates are right with given probabilities (simulated_trees.py), in which the right ones are the tokens that the
target will sample. A position has one outcome, however often it is drafted: which of the candidates is right, if any.
All candidates claim their probabilities, as those of a calibrated drafter do, also below a wrong token, so that the
target verifies as many useless tokens as with a real head.

SGLang and llama.cpp simulate accept lengths, too, but in the verification; here the target verifies as always.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence

from bench.gpu.system.continuation import Continuation
from bench.gpu.system.simulated_trees import Nodes, adaptive, claims_of, grown, of_shape, probability_of
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT
from services.draft.drafters.base import ExpandRequest, Expansion
from services.draft.drafters.model import ModelDrafter
from services.draft.sessions.batch import Growth
from services.draft.sessions.session import DraftSession

_FAR = 1000  # at least this many tokens of the text lie between a token and the one that replaces it as a wrong one
_MASK = (1 << 64) - 1


class SimulatedAcceptance:
    """Replaces the trees of one drafter. A request chooses its accept length by its seed."""

    def __init__(
        self, text: Continuation, accept_lengths: Sequence[float], children: int, shape: TreeShape | None = None,
        growths: Sequence[Growth] = (),
    ) -> None:  # fmt: skip
        """accept_lengths: seed s has the one at index s modulo their number; of explicit trees of this shape, or of
        adaptive ones of 15 nodes. children: candidates of a node. growths: what programs grow of adaptive trees.

        Raises ValueError for an accept length that such trees cannot have.
        """
        self._text = text
        self._children, self._shape = children, shape
        self._growths = {growth.expansions: growth for growth in growths}
        self._claims = [claims_of(probability_of(length, children, self._whole), children) for length in accept_lengths]
        self._bounds = [list(itertools.accumulate(map(math.exp, claims))) for claims in self._claims]
        self._grown: dict[tuple[int, int], Nodes] = {}  # by index of the accept length and number of nodes
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
        index, count = self._index(expansion.session), len(expansion.tokens)
        claims = self._claims[index]
        nodes = self._grown.get((index, count))
        if nodes is None:
            nodes = self._grown[index, count] = self._tree(expansion, claims)
        places = [-1] * count if expansion.places else []
        for node, place in zip(nodes.expanded, sorted(place for place in expansion.places if place >= 0), strict=False):
            places[node] = place
        return expansion._replace(
            tokens=self._tokens(expansion, nodes),
            parents=nodes.parents,
            log_scores=[claims[rank] for rank in nodes.ranks],
            places=places,
        )

    def _tree(self, expansion: Expansion, claims: Sequence[float]) -> Nodes:
        """The nodes that replace those of an expansion, as many."""
        count = len(expansion.tokens)
        if expansion.whole:
            nodes = self._whole(claims)
        elif expansion.places:
            growth = self._growths[count // self._children - 1]
            nodes = grown(claims, growth.rounds, growth.width)
        else:
            nodes = grown(claims[:count], 0, 0)
        if len(nodes.parents) != count:
            raise ValueError(f"the drafter has grown {count} nodes, not {len(nodes.parents)}")
        return nodes

    def _whole(self, claims: Sequence[float]) -> Nodes:
        """The tree whose accept length is given."""
        shape = self._shape
        return adaptive(claims) if shape is None else of_shape(claims, shape.steps, shape.rows - 1)

    def _tokens(self, expansion: Expansion, nodes: Nodes) -> list[int]:
        """The drafted tokens, where no two siblings are alike, and the right ones at the places that the outcomes say.

        Below a wrong token all are wrong: none is the one that would follow at this place.
        """
        session, tokens = expansion.session, list(expansion.tokens)
        root, above = int(session.tokens[-1]), self._depth(session, expansion.node)
        right = {-1} if self._is_right(session, expansion.node) else set[int]()  # nodes of the target's text
        depths = {-1: above}
        siblings: dict[int, set[int]] = {}
        for node, (parent, rank) in enumerate(zip(nodes.parents, nodes.ranks, strict=True)):
            depth = depths[node] = depths[parent] + 1
            follows = self._text.after(root, depth)
            taken = siblings.setdefault(parent, {follows})
            if parent in right and rank == self._outcome(session, depth):
                right.add(node)
                tokens[node] = follows
            else:
                tokens[node] = self._wrong(tokens[node], taken)
                taken.add(tokens[node])
        return tokens

    def _depth(self, session: DraftSession, node: int) -> int:
        return 0 if node == ROOT else session.tree.depth[node]

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

    def _index(self, session: DraftSession) -> int:
        """Of the session's accept length."""
        return session.sampling.seed % len(self._claims)

    def _outcome(self, session: DraftSession, depth: int) -> int:
        """The rank of the candidate that is right at a depth below the root; past the last one if none is."""
        first, position = int(session.tokens[0]), session.length + depth
        number = _uniform(first << 32 | position)
        return bisect_right(self._bounds[self._index(session)], number)


def _uniform(number: int) -> float:
    """A number in [0, 1), by SplitMix64."""
    x = (number + 1) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return ((x ^ x >> 31) >> 11) / (1 << 53)
