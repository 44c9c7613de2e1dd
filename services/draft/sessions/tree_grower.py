"""Grows the draft tree of one session: adds the expansions of its drafters, within the limits of tree and session.

Every drafter of the session has a frontier: the nodes that it may expand next. The main drafter's is the last.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from outrider.speculation.sampling import StopConditions
from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.claims import ClaimModels, Claims
from services.draft.sessions.frontier import Frontier, TreeLimits


class TreeGrower:
    """Adds nodes to a draft tree, and keeps the frontiers of its drafters up to date.

    origin: by node, the drafter that proposed it first, as index of its frontier
    max_depth: deepest useful level. The last token that the session may have is sampled as a bonus token anyway.
    """

    def __init__(
        self,
        tree: SpeculationTree,
        frontiers: tuple[Frontier, ...],
        limits: TreeLimits,
        stop: StopConditions,
        eos_token_ids: tuple[int, ...],
        prompt_length: int,
        models: ClaimModels | None = None,
    ) -> None:
        """models: of the drafters' claims, where several drafters grow the tree."""
        self.limits = limits
        self.claims = None if models is None else Claims(tree, models)
        self.origin: list[int] = []
        self._tree = tree
        self._frontiers = frontiers
        self._stop = stop
        self._stop_ids = stop.stop_ids(eos_token_ids)
        self.prompt_length = prompt_length
        self.max_depth = self._useful_depth()

    @property
    def _new_tokens(self) -> int:
        """Tokens committed after the prompt."""
        return self._tree.length - self.prompt_length

    @property
    def stop_ids(self) -> Container[int]:
        """Tokens behind which the text ends."""
        return self._stop_ids

    def _useful_depth(self) -> int:
        return min(self.limits.depth, self._stop.max_tokens - self._new_tokens - 1)

    # --- expansions ---

    def add(
        self, node: int, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int = -1
    ) -> None:
        """Add an expansion of a node. parents: index among `tokens`, or -1 for the node itself.

        The node and all inner nodes of the expansion count as expanded by the drafter.
        """
        self._mark_expanded(node, drafter)
        if self.claims is None and max(parents, default=-1) < 0 and not self._tree.children_of(node):
            self._add_leaves(node, tokens, log_scores, drafter)
            self._refresh()
            return
        added = self._add_below(node, tokens, parents, log_scores, drafter)
        inner = set(parents)
        for i, child in enumerate(added):
            if child is None:
                continue
            if i in inner:
                self._mark_expanded(child, drafter)
            self._offer(child)
        self._refresh()

    def accepts_whole_tree(self, tree: TreeShape) -> bool:
        """True if the main drafter may add an explicit tree at once, and all of its nodes would be of use."""
        return self._frontiers[-1].accepts_whole_tree and self._takes_levels(tree.steps)

    def accepts_growth(self, levels: int) -> bool:
        """True if the main drafter may add this many levels of an adaptive tree at once, and all would be of use."""
        return self._frontiers[-1].accepts_growth and self._takes_levels(levels)

    def _takes_levels(self, levels: int) -> bool:
        banned = self._new_tokens < self._stop.min_tokens and bool(self._stop_ids)
        return self.max_depth >= levels and not banned

    def add_whole_tree(
        self, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int = -1
    ) -> None:
        """Add an explicit tree, which is not expanded further. parents: index among `tokens`, or -1 for the root."""
        self._add_below(ROOT, tokens, parents, log_scores, drafter)
        self._frontiers[drafter].mark_complete()
        self._refresh()

    def add_grown(
        self, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], places: Sequence[int],
        drafter: int = -1,
    ) -> list[int | None]:  # fmt: skip
        """Add nodes that several rounds have grown below the root; the tree grows on from them.

        places: -1 for nodes that were not expanded; others as of `add`. What the host would not have expanded, because
        it is too unlikely or ends the text, does not count as expanded. Returns the nodes' indices; None for those left
        out.
        """
        floor = self.limits.log_floor
        paths: list[float] = []  # of nodes that count as expanded; others are -inf
        known: list[float] = []  # log-scores of nodes to add
        for token, parent, score, place in zip(tokens, parents, log_scores, places, strict=True):
            path = score + (0.0 if parent < 0 else paths[parent])
            known.append(score if path > -math.inf else path)
            paths.append(path if place >= 0 and path >= floor and token not in self._stop_ids else -math.inf)
        self._mark_expanded(ROOT, drafter)
        added = self._add_below(ROOT, tokens, parents, known, drafter)
        for node, path in zip(added, paths, strict=True):
            if node is not None:
                if path > -math.inf:
                    self._mark_expanded(node, drafter)
                self._offer(node)
        self._refresh()
        return added

    def _add_below(
        self, node: int, tokens: Sequence[int], parents: Sequence[int], log_scores: Sequence[float], drafter: int
    ) -> list[int | None]:
        """Add nodes below a node. Returns their indices; None for nodes that may not follow, and below them."""
        added: list[int | None] = []
        for token, parent, log_score in zip(tokens, parents, log_scores, strict=True):
            above = node if parent < 0 else added[parent]
            if above is None or log_score == -math.inf:
                added.append(None)
            else:
                added.append(self._add_child(above, token, min(log_score, 0.0), drafter))
        if self.claims is not None:
            self._claim(added, log_scores, drafter)
        return added

    def _claim(self, added: Sequence[int | None], log_scores: Sequence[float], drafter: int) -> None:
        """Score the nodes of an expansion, and their siblings, by all drafters' claims."""
        assert self.claims is not None
        known = [(child, i) for i, child in enumerate(added) if child is not None]
        above = [self._tree.parent[child] for child, _ in known]
        self.claims.added(above, [child for child, _ in known], [log_scores[i] for _, i in known], drafter)

    def _add_leaves(self, node: int, tokens: Sequence[int], log_scores: Sequence[float], drafter: int) -> None:
        """Add the first children of a node, without further levels: the common case, made fast."""
        tree = self._tree
        depth = 1 if node == ROOT else tree.depth[node] + 1
        if depth > self.max_depth:
            return
        count = min(self.limits.children, len(tokens))
        if not self._stop_ids.isdisjoint(tokens) and self._new_tokens + depth - 1 < self._stop.min_tokens:
            fitting = [i for i, token in enumerate(tokens) if token not in self._stop_ids]
            tokens, log_scores = [tokens[i] for i in fitting], [log_scores[i] for i in fitting]
        leaves = tree.add_leaves(node, tokens[:count], log_scores[:count])
        self.origin += [drafter] * len(leaves)
        if depth < self.max_depth:
            for leaf in leaves:
                if tree.token[leaf] not in self._stop_ids:
                    for frontier in self._frontiers:
                        frontier.offer(tree, leaf)

    def _add_child(self, parent: int, token: int, log_score: float, drafter: int) -> int | None:
        tree = self._tree
        depth = 1 if parent == ROOT else tree.depth[parent] + 1
        if depth > self.max_depth:
            return None
        if token in self._stop_ids and self._new_tokens + depth - 1 < self._stop.min_tokens:
            return None
        siblings = tree.children_of(parent)
        if len(siblings) >= self.limits.children and all(tree.token[i] != token for i in siblings):
            return None
        node = tree.add(parent, token, log_score)
        if node is not None and node == len(self.origin):
            self.origin.append(drafter)
        return node

    # --- frontiers ---

    def _mark_expanded(self, node: int, drafter: int) -> None:
        for child in self._frontiers[drafter].mark_expanded(self._tree, node):
            self._offer(child)

    def _offer(self, node: int) -> None:
        """Offer a node to the frontiers, unless it is too deep or ends the text."""
        if self._tree.depth[node] < self.max_depth and self._tree.token[node] not in self._stop_ids:
            for frontier in self._frontiers:
                frontier.offer(self._tree, node)

    def _refresh(self) -> None:
        for frontier in self._frontiers:
            frontier.refresh(self._tree, self.max_depth)

    # --- commits ---

    def renumber(self, kept: list[int], root_expanded: bool) -> None:
        """The root has moved down. kept: old index of each surviving node; root_expanded: for the main drafter."""
        self.max_depth = self._useful_depth()
        self.origin = [self.origin[old] for old in kept]
        if self.claims is not None:
            self.claims.renumber(kept)
        for frontier in self._frontiers:
            frontier.renumber(kept, root_expanded=root_expanded and frontier is self._frontiers[-1])

    def prune(self) -> list[int] | None:
        """After `renumber`: drop nodes that are useless to the main drafter. Returns the others; None for all."""
        self._refresh()
        needed = self._frontiers[-1].needed(self._tree)
        if needed is not None:
            self._tree.retain(needed)
            if self.claims is not None:
                self.claims.renumber(needed)
            for frontier in self._frontiers:
                frontier.renumber(needed, root_expanded=frontier.root_expanded)
            self._refresh()
            self.origin = [self.origin[old] for old in needed]
        for node in range(len(self._tree)):
            self._offer(node)
        return needed

    def clear(self) -> None:
        """The tree was emptied."""
        self.origin = []
        if self.claims is not None:
            self.claims.clear()
        for frontier in self._frontiers:
            frontier.reset()
