"""A session as the draft engine holds it: its tokens, its own speculation tree, and what is still to be done there.

Every drafter of the session has a frontier: what it has still to expand. The main one's is the last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.serving.messages import OpenSession
from outrider.speculation.noise import position_keys
from outrider.speculation.proposal import UNLIMITED_DRAFT, Proposal
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.features import FeatureRows
from services.draft.sessions.frontier import Frontier, TreeLimits

_KEY_BLOCK = 64
# A node is sent again if its log-score has risen by more than this.
_NEWS = 0.1


class DraftSession:
    """Tokens and speculation tree of one session; one owner, the engine thread."""

    def __init__(
        self,
        request: OpenSession,
        limits: TreeLimits,
        eos_token_ids: tuple[int, ...],
        frontiers: Sequence[Frontier] = (),
        turn: int = 0,
    ) -> None:
        """frontiers: of its drafters, the main one's last; by default one that grows from what it has expanded.

        turn: of those that wait for a place, the lowest comes first.
        """
        self.id = request.session_id
        self.turn = turn
        self.sampling = request.sampling
        self.stop = request.stop
        self.stop_ids = request.stop.stop_ids(eos_token_ids)
        self.prompt_length = request.prompt_length
        self.cache_salt = request.cache_salt
        self.traceparent = request.traceparent
        self.opened_at = time.time_ns()
        self.opened_length = len(request.tokens)
        self.limits = limits
        self.tree = SpeculationTree(request.tokens, limits.nodes)
        self.frontiers = tuple(frontiers) or (Frontier(limits.nodes, limits.floor, from_parents=True),)
        self.draft_budget = 0 if request.drafting_paused else UNLIMITED_DRAFT  # nodes, by the last commit
        self.answered = True  # the last commit has been followed by a proposal, if only an empty one
        self.features = FeatureRows()
        self._tokens = np.empty(len(request.tokens) + 256, dtype=np.uint32)
        self._tokens[: len(request.tokens)] = request.tokens
        self._sent: list[float] = []  # by node: the log-score that the target knows; -inf if it was not sent
        self.origin: list[int] = []  # by node: the drafter that proposed it first, as index of its frontier
        self._told: dict[int, float] = {}  # log-scores of nodes that were sent before the tree was replanted, by hash
        # The deepest node worth having: the last token that the session may have comes as a bonus anyway.
        self.max_depth = self._deepest()
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

    def _deepest(self) -> int:
        return min(self.limits.depth, self.stop.max_tokens - self.new_tokens - 1)

    @property
    def root_expanded(self) -> bool:
        """True if the main drafter has told the root's children."""
        return self.frontiers[-1].root_expanded

    @property
    def blocked(self) -> bool:
        """True if the main drafter cannot know the root's children before the target's next features."""
        return self.frontiers[-1].blocked

    @blocked.setter
    def blocked(self, blocked: bool) -> None:
        self.frontiers[-1].blocked = blocked

    def set_urgent(self, urgent: bool) -> None:
        """Whether the main drafter is to expand the root even if nobody wants hints."""
        self.frontiers[-1].urgent = urgent

    @property
    def rounds_waited(self) -> int:
        """Rounds since the main drafter last grew this tree."""
        return self.frontiers[-1].rounds_waited

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

    @property
    def growing(self) -> bool:
        """True if a drafter has something to expand."""
        return any(map(self.wants, range(len(self.frontiers))))

    def wants(self, drafter: int) -> bool:
        """True if a drafter has something to expand. drafter: index of its frontier."""
        frontier = self.frontiers[drafter]
        return (
            frontier.wants
            and (frontier.urgent or (self.draft_budget > 0 and self.max_depth >= 1))
            and (not frontier.root_expanded or len(self.tree) < self.tree.capacity)
        )

    def wishes(self, count: int, drafter: int = -1) -> list[tuple[float, int]]:
        """Up to `count` nodes for a drafter to expand, as (log-probability to reach it, node), best first."""
        return self.frontiers[drafter].wishes(self.tree, count) if self.wants(drafter) else []

    def add(
        self, node: int, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int = -1
    ) -> None:
        """Add what a drafter says follows a node. parents: index among `tokens`, or -1 for the node itself.

        All but the leaves of the addition count as expanded by it, the node itself included.
        """
        self._mark_expanded(node, drafter)
        if not any(parent >= 0 for parent in parents) and not self.tree.children_of(node):
            self._add_leaves(node, tokens, log_scores, drafter)
            self._survey()
            return
        places = self._add_below(node, tokens, parents, log_scores, drafter)
        inner = set(parents)
        for i, place in enumerate(places):
            if place is None:
                continue
            if i in inner:
                self._mark_expanded(place, drafter)
            self._enter_frontiers(place)
        self._survey()

    def takes_whole(self, tree: TreeShape) -> bool:
        """True if all nodes of an explicit tree would be of use to the main drafter's, and can be planted at once."""
        banned = self.new_tokens < self.stop.min_tokens and bool(self.stop_ids)
        return self.frontiers[-1].takes_whole and self.max_depth >= tree.steps and not banned

    def plant(
        self, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int = -1
    ) -> None:
        """Add a whole tree. parents: index among `tokens`, or -1 for the root. Nothing of it is expanded any more."""
        self._add_below(ROOT, tokens, parents, log_scores, drafter)
        self.frontiers[drafter].finish()
        self._survey()

    def _add_below(
        self, node: int, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int
    ) -> list[int | None]:
        """Add nodes below a node; without those that cannot follow, and what is below them. Returns all places."""
        places: list[int | None] = []
        for token, parent, log_score in zip(tokens, parents, log_scores, strict=True):
            above = node if parent < 0 else places[parent]
            left_out = above is None or log_score == -math.inf
            places.append(None if left_out else self._add_child(above, token, min(log_score, 0.0), drafter))
        return places

    def _add_leaves(self, node: int, tokens: Sequence[int], log_scores: Sequence[float], drafter: int) -> None:
        """What `add` does for the first children of a node, most of what there is to add."""
        depth = 1 if node == ROOT else self.tree.depth[node] + 1
        if depth > self.max_depth:
            return
        count = min(self.limits.children, len(tokens))
        if not self.stop_ids.isdisjoint(tokens) and self.new_tokens + depth - 1 < self.stop.min_tokens:
            fitting = [i for i, token in enumerate(tokens) if token not in self.stop_ids]
            tokens, log_scores = [tokens[i] for i in fitting], [log_scores[i] for i in fitting]
        leaves = self.tree.add_leaves(node, tokens[:count], log_scores[:count])
        self.origin += [drafter] * len(leaves)
        if self._told:
            self._sent += [self._told.get(self.tree.hash[i], -math.inf) for i in leaves]
        else:
            self._sent += [-math.inf] * len(leaves)
        if depth < self.max_depth:
            for leaf in leaves:
                if self.tree.token[leaf] not in self.stop_ids:
                    for frontier in self.frontiers:
                        frontier.enter(self.tree, leaf)

    def _add_child(self, parent: int, token: int, log_score: float, drafter: int) -> int | None:
        depth = 1 if parent == ROOT else self.tree.depth[parent] + 1
        if depth > self.max_depth:
            return None
        if token in self.stop_ids and self.new_tokens + depth - 1 < self.stop.min_tokens:
            return None
        siblings = self.tree.children_of(parent)
        if len(siblings) >= self.limits.children and all(self.tree.token[i] != token for i in siblings):
            return None
        node = self.tree.add(parent, token, log_score)
        if node is not None and node == len(self._sent):
            self.origin.append(drafter)
            self._sent.append(self._told.get(self.tree.hash[node], -math.inf))
        return node

    def _mark_expanded(self, node: int, drafter: int) -> None:
        for child in self.frontiers[drafter].mark(self.tree, node):
            self._enter_frontiers(child)

    def _enter_frontiers(self, node: int) -> None:
        if self.tree.depth[node] < self.max_depth and self.tree.token[node] not in self.stop_ids:
            for frontier in self.frontiers:
                frontier.enter(self.tree, node)

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
        """Move the root down. Returns the old index of each surviving node, in its new order.

        root_expanded: the main drafter has told the new root's children; the others are asked anew.
        """
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self.length : end] = tokens
        kept = self.tree.commit(tokens)
        self.max_depth = self._deepest()
        self._sent = [self._sent[old] for old in kept]
        self.origin = [self.origin[old] for old in kept]
        self.answered = not self.draft_budget  # nobody waits for what is not wanted
        self._told = {}
        for frontier in self.frontiers:
            frontier.renumber(kept, root_expanded=root_expanded and frontier is self.frontiers[-1])
        kept = self._prune(kept)
        for node in range(len(kept)):
            self._enter_frontiers(node)
        return kept

    def _survey(self) -> None:
        for frontier in self.frontiers:
            frontier.survey(self.tree, self.max_depth)

    def _prune(self, kept: list[int]) -> list[int]:
        """Forget nodes that are of no use. kept: old index of each node. Returns those of the nodes that stay."""
        self._survey()
        main = self.frontiers[-1]
        needed = main.needed(self.tree)
        if needed is None:
            return kept
        self.tree.retain(needed)
        for frontier in self.frontiers:
            frontier.renumber(needed, root_expanded=frontier.root_expanded)
        self._survey()
        self._sent = [-math.inf] * len(needed)  # a tree is proposed as a whole
        self.origin = [self.origin[old] for old in needed]
        return [kept[i] for i in needed]

    def reset(self) -> None:
        """Forget the tree, but not the tokens."""
        self.tree.clear()
        self._sent, self.origin = [], []
        self._told = {}
        for frontier in self.frontiers:
            frontier.reset()

    def replant(self) -> None:
        """Forget the tree, for a better one is to grow in its place. What the target knows of it is not sent again."""
        told = {self.tree.hash[i]: sent for i, sent in enumerate(self._sent) if sent > -math.inf}
        self.reset()
        self._told = told

    # --- proposals ---

    def answer(self) -> list[Proposal]:
        """The new proposals; an empty one if the last commit has led to none and the root's children are known."""
        proposals = self.proposals()
        if not proposals and not self.answered and not self._awaits_root():
            proposals = self._proposals({ROOT: []})
        self.answered = self.answered or bool(proposals)
        return proposals

    def _awaits_root(self) -> bool:
        """True if a drafter has yet to tell what follows the root, now or once it is fed."""
        return any(
            not frontier.complete and (self.wants(drafter) or frontier.blocked)
            for drafter, frontier in enumerate(self.frontiers)
        )

    def proposals(self) -> list[Proposal]:
        """The nodes above the floor that are news to the target, hung on what it knows; then they count as sent."""
        tree, sent, floor = self.tree, self._sent, self.limits.log_floor
        chosen = self.frontiers[-1].chosen(tree)
        fresh = [i for i in chosen if tree.log_score[i] > sent[i] + _NEWS and tree.path_score[i] >= floor]
        if len(fresh) > self.draft_budget:  # the best; no child is better than its parent
            fresh = sorted(sorted(fresh, key=lambda i: -tree.path_score[i])[: self.draft_budget])
        groups: dict[int, list[int]] = {}  # by anchor, in the tree's order: parents first
        anchor_of: dict[int, int] = {}
        for node in fresh:
            parent = tree.parent[node]
            anchor_of[node] = anchor_of.get(parent, parent)
            groups.setdefault(anchor_of[node], []).append(node)
            sent[node] = tree.log_score[node]
        return self._proposals(groups) if groups else []

    def _proposals(self, groups: dict[int, list[int]]) -> list[Proposal]:
        """groups: nodes by anchor, parents before children."""
        tree, length = self.tree, self.length
        nodes = [node for group in groups.values() for node in group]
        parents: list[int] = []
        for group in groups.values():
            row = {node: i for i, node in enumerate(group)}
            parents += [row.get(tree.parent[node], -1) for node in group]
        tokens = np.array([tree.token[node] for node in nodes], np.uint32)
        above = np.array(parents, np.int32)
        scores = np.array([tree.log_score[node] for node in nodes], np.float32)
        proposals: list[Proposal] = []
        first = 0
        for anchor, group in groups.items():
            own = slice(first, first + len(group))
            first = own.stop
            place = length if anchor == ROOT else length + tree.depth[anchor]
            path = tree.hash_of(anchor)
            proposals.append(Proposal(self.id, place, path, tokens[own], above[own], scores[own], length))
        return proposals
