"""A session as the draft engine holds it: its tokens, its own speculation tree, and what is still to be done there.

Per node, beside what the tree keeps:
    expanded    its children have been asked for
    sent        it has been proposed
A node waits in the frontier, ordered by path probability, until it is expanded.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.serving.messages import OpenSession
from outrider.speculation.noise import position_keys
from outrider.speculation.proposal import ALL_WANTED, Proposal
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.features import FeatureRows

_KEY_BLOCK = 64
# A node is sent again if its log-score has risen by more than this.
_NEWS = 0.1


@dataclass(frozen=True)
class TreeLimits:
    """How far a tree grows.

    nodes: most nodes a session. depth: deepest node, in levels below the root. children: most children a node.
    expansions: most nodes of a tree that are expanded at a time. floor: least probability that a node is reached, below
    which it is neither expanded nor sent.
    """

    nodes: int = 256
    depth: int = 16
    children: int = 4
    expansions: int = 64
    floor: float = 2e-3

    @property
    def log_floor(self) -> float:
        """Natural log of the floor."""
        return math.log(self.floor)


class DraftSession:
    """Tokens and speculation tree of one session; one owner, the engine thread."""

    def __init__(self, request: OpenSession, limits: TreeLimits, eos_token_ids: tuple[int, ...]) -> None:
        self.id = request.session_id
        self.sampling = request.sampling
        self.stop = request.stop
        self.stop_ids = request.stop.stop_ids(eos_token_ids)
        self.prompt_length = request.prompt_length
        self.cache_salt = request.cache_salt
        self.limits = limits
        self.tree = SpeculationTree(request.tokens, limits.nodes)
        self.root_expanded = False
        self.rounds_waited = 0  # since the engine last grew this tree
        self.wanted = ALL_WANTED  # nodes, by the last commit
        self.answered = True  # the last commit has been followed by a proposal, if only an empty one
        self.features = FeatureRows()
        self.blocked = False  # its root's children cannot be known before the target's next features
        self.frontier: list[tuple[float, int]] = []  # (-path_score, node), best first
        self._tokens = np.empty(len(request.tokens) + 256, dtype=np.uint32)
        self._tokens[: len(request.tokens)] = request.tokens
        self._expanded: list[bool] = []
        self._sent: list[bool] = []
        self._told: dict[int, float] = {}  # log-scores of nodes that were sent before the tree was replanted, by hash
        self._keys = np.empty((0, 2), dtype=np.uint32)
        self._keys_from = 0

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.tree.length

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Prompt and committed tokens, [length] uint32, a view."""
        return self._tokens[: self.length]

    @property
    def new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return self.length - self.prompt_length

    @property
    def max_depth(self) -> int:
        """Deepest node worth having: the last token that the session may have comes as a bonus anyway."""
        return min(self.limits.depth, self.stop.max_tokens - self.new_tokens - 1)

    def keys(self, positions: NDArray[np.integer]) -> NDArray[np.uint32]:
        """Noise keys of positions near the end of the session. positions: [n]. Returns [n, 2] uint32."""
        first, last = int(positions.min()), int(positions.max())
        if first < self._keys_from or last >= self._keys_from + len(self._keys):
            self._keys_from = first
            block = np.arange(first, max(last + 1, first + _KEY_BLOCK))
            self._keys = position_keys(self.sampling.seed, block)
        keys: NDArray[np.uint32] = self._keys[positions - self._keys_from]
        return keys

    @property
    def silent(self) -> bool:
        """True if there is nothing to say before a message arrives."""
        return self.answered or (self.blocked and not self.root_expanded)

    # --- growth ---

    def wishes(self, count: int) -> list[tuple[float, int]]:
        """Up to `count` nodes to expand, as (log-probability to reach it, node), best first."""
        if self.max_depth < 1 or not self.wanted:
            return []
        if not self.root_expanded:
            return [] if self.blocked else [(0.0, ROOT)]
        if len(self.tree) >= self.tree.capacity:
            return []
        count = min(count, self.limits.expansions - self._expanded.count(True))
        return [(-score, node) for score, node in self.frontier[: max(count, 0)]]

    def add(self, node: int, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float]) -> None:
        """Add what a drafter says follows a node. parents: index among `tokens`, or -1 for the node itself.

        All but the leaves of the addition count as expanded, the node itself included.
        """
        self._mark_expanded(node)
        places: list[int | None] = []
        for token, parent, log_score in zip(tokens, parents, log_scores, strict=True):
            above = node if parent < 0 else places[parent]
            places.append(None if above is None else self._add_child(above, token, min(log_score, 0.0)))
        inner = {parent for parent in parents if parent >= 0}
        for i, place in enumerate(places):
            if place is None:
                continue
            if i in inner:
                self._mark_expanded(place)
            else:
                self._enter_frontier(place)

    def _add_child(self, parent: int, token: int, log_score: float) -> int | None:
        depth = 1 if parent == ROOT else self.tree.depth[parent] + 1
        before = self.new_tokens + depth - 1  # new tokens before this one
        if depth > self.max_depth or (before < self.stop.min_tokens and token in self.stop_ids):
            return None
        siblings = self.tree.children_of(parent)
        if len(siblings) >= self.limits.children and all(self.tree.token[i] != token for i in siblings):
            return None
        node = self.tree.add(parent, token, log_score)
        if node is not None and node == len(self._expanded):
            self._expanded.append(False)
            self._sent.append(log_score <= self._told.get(self.tree.hash[node], -math.inf) + _NEWS)
        return node

    def _mark_expanded(self, node: int) -> None:
        if node == ROOT:
            self.root_expanded = True
        elif not self._expanded[node]:
            self._expanded[node] = True
            self.frontier = [entry for entry in self.frontier if entry[1] != node]

    def _enter_frontier(self, node: int) -> None:
        tree = self.tree
        score = tree.path_score[node]
        if (
            not self._expanded[node]
            and score >= self.limits.log_floor
            and tree.depth[node] < self.max_depth
            and tree.token[node] not in self.stop_ids
            and all(entry[1] != node for entry in self.frontier)
        ):
            insort(self.frontier, (-score, node))

    # --- commits ---

    def path_of(self, tokens: Iterable[int]) -> list[int]:
        """Nodes along tokens below the root, as far as the tree has them."""
        path: list[int] = []
        node = ROOT
        for token in tokens:
            node = next((child for child in self.tree.children_of(node) if self.tree.token[child] == token), ROOT)
            if node == ROOT:
                break
            path.append(node)
        return path

    def commit(self, tokens: NDArray[np.uint32], root_expanded: bool) -> list[int]:
        """Move the root down. Returns the old index of each surviving node, in its new order."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self.length : end] = tokens
        kept = self.tree.commit(tokens)
        self._expanded = [self._expanded[old] for old in kept]
        self._sent = [self._sent[old] for old in kept]
        self.root_expanded = root_expanded
        self.answered = not self.wanted  # nobody waits for what is not wanted
        self.frontier = []
        self._told = {}
        for node in range(len(kept)):
            self._enter_frontier(node)
        return kept

    def reset(self) -> None:
        """Forget the tree, but not the tokens."""
        self.tree.clear()
        self.root_expanded = False
        self.frontier, self._expanded, self._sent = [], [], []
        self._told = {}

    def replant(self) -> None:
        """Forget the tree, for a better one is to grow in its place. What the target knows of it is not sent again."""
        told = {self.tree.hash[i]: self.tree.log_score[i] for i, sent in enumerate(self._sent) if sent}
        self.reset()
        self._told = told

    # --- proposals ---

    def answer(self) -> list[Proposal]:
        """The new proposals; an empty one if the last commit has led to none and the root's children are known."""
        proposals = self.proposals()
        waits = self.blocked and not self.root_expanded
        if not proposals and not self.answered and not waits and (self.root_expanded or not self.wishes(1)):
            proposals = [self._proposal(ROOT, [])]
        self.answered = self.answered or bool(proposals)
        return proposals

    def proposals(self) -> list[Proposal]:
        """The nodes above the floor that have not been sent, hung on what has; they count as sent afterwards."""
        tree, floor = self.tree, self.limits.log_floor
        fresh = [i for i in range(len(tree)) if not self._sent[i] and tree.path_score[i] >= floor]
        if len(fresh) > self.wanted:  # the best; no child is better than its parent
            fresh = sorted(sorted(fresh, key=lambda i: -tree.path_score[i])[: self.wanted])
        groups: dict[int, list[int]] = {}  # by anchor, in the tree's order: parents first
        anchor_of: dict[int, int] = {}
        for node in fresh:
            parent = tree.parent[node]
            anchor_of[node] = anchor_of.get(parent, parent)
            groups.setdefault(anchor_of[node], []).append(node)
            self._sent[node] = True
        return [self._proposal(anchor, nodes) for anchor, nodes in groups.items()]

    def _proposal(self, anchor: int, nodes: list[int]) -> Proposal:
        tree = self.tree
        row = {node: i for i, node in enumerate(nodes)}
        return Proposal(
            self.id,
            self.length + (0 if anchor == ROOT else tree.depth[anchor]),
            tree.hash_of(anchor),
            np.array([tree.token[i] for i in nodes], dtype=np.uint32),
            np.array([row.get(tree.parent[i], -1) for i in nodes], dtype=np.int32),
            np.array([tree.log_score[i] for i in nodes], dtype=np.float32),
            committed_length=self.length,
        )
