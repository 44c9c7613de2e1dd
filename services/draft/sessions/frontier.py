"""The frontier of one drafter in a session's draft tree. Several drafters in one session have a frontier each.

    expanded    nodes whose children the drafter has computed
    open        nodes that it may expand: likely enough, not too deep, no end-of-sequence token

A drafter that computes a node from its parent's state (`from_parents`) can only expand below its own expansions.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree


@dataclass(frozen=True)
class TreeLimits:
    """Limits of a draft tree.

    nodes:    largest number of nodes
    depth:    deepest level below the root
    children: largest number of children a node
    floor:    least probability that a node is reached; less likely nodes are neither expanded nor sent
    shape:    of explicit trees; None for adaptive ones
    """

    nodes: int = 256
    depth: int = 16
    children: int = 4
    floor: float = 2e-3
    shape: TreeShape | None = None

    @property
    def log_floor(self) -> float:
        """Natural log of the floor."""
        return math.log(self.floor) if self.floor else -math.inf


class Frontier:
    """The nodes of one tree that one drafter may expand.

    held:          the drafter holds the session
    root_expanded: the drafter has expanded the root
    blocked:       the root cannot be expanded before the target's next features arrive
    urgent:        the root is expanded even while drafting is paused
    rounds_waited: since the drafter last expanded a node of the session
    """

    def __init__(self, expansions: int, floor: float, *, from_parents: bool) -> None:
        """expansions: largest number of expanded nodes. floor: least probability to reach a node that is expanded."""
        self.held = False
        self.root_expanded = False
        self.blocked = False
        self.urgent = False
        self.rounds_waited = 0
        self.expanded: set[int] = set()
        self._open: set[int] = set()
        self._ranked: list[tuple[float, int]] = []  # the open nodes behind their negated scores, best first
        self._rescored = 0  # `rescored` of the tree when they were ranked
        self._expansions = expansions
        self._log_floor = math.log(floor)
        self._from_parents = from_parents

    def reset(self) -> None:
        """Nothing is expanded."""
        self.root_expanded = self.blocked = self.urgent = False
        self.expanded.clear()
        self._open.clear()
        self._ranked.clear()

    @property
    def complete(self) -> bool:
        """True if the root was expanded, even if it has no children."""
        return self.root_expanded

    @property
    def expandable(self) -> bool:
        """True if there is a node to expand."""
        if not self.root_expanded:
            return self.held and not self.blocked
        return self.held and bool(self._open) and len(self.expanded) < self._expansions

    def best_leaves(self, tree: SpeculationTree, count: int) -> list[tuple[float, int]]:
        """Up to `count` nodes to expand, as (log-probability to reach it, node), best first."""
        if not self.expandable:
            return []
        if not self.root_expanded:
            return [(0.0, ROOT)]
        if self._rescored != tree.rescored:
            self._ranked = sorted((-tree.path_score[node], node) for node in self._open)
            self._rescored = tree.rescored
        count = min(count, self._expansions - len(self.expanded))
        return [(-cost, node) for cost, node in self._ranked[:count]]

    @property
    def accepts_whole_tree(self) -> bool:
        """True if a whole tree may be added at once."""
        return False

    @property
    def accepts_growth(self) -> bool:
        """True if several levels may be added at once, because none is there."""
        return not self.root_expanded

    def mark_complete(self) -> None:
        """A whole tree was added."""
        self.root_expanded = True

    def mark_expanded(self, tree: SpeculationTree, node: int) -> list[int]:
        """A node, or the root, was expanded. Returns children of other drafters, which may be expanded now."""
        if node == ROOT:
            self.root_expanded = True
        else:
            self.expanded.add(node)
            if node in self._open:
                self._close(tree, node)
        return tree.children_of(node) if self._from_parents else []

    def offer(self, tree: SpeculationTree, node: int) -> None:
        """Open a node, if this drafter can expand it and it is likely enough."""
        score = tree.path_score[node]
        if score < self._log_floor or node in self.expanded or node in self._open:
            return
        parent = tree.parent[node]
        if not self._from_parents or (self.root_expanded if parent == ROOT else parent in self.expanded):
            self._open.add(node)
            insort(self._ranked, (-score, node))

    def _close(self, tree: SpeculationTree, node: int) -> None:
        self._open.remove(node)
        entry = -tree.path_score[node], node
        place = bisect_left(self._ranked, entry)
        if place < len(self._ranked) and self._ranked[place] == entry:  # otherwise scores have changed since
            del self._ranked[place]

    def renumber(self, kept: list[int], *, root_expanded: bool) -> None:
        """The root has moved down. kept: old index of each surviving node; open nodes must be offered again."""
        self.root_expanded = root_expanded
        known = root_expanded or not self._from_parents  # otherwise expansion restarts at the root
        self.expanded = {new for new, old in enumerate(kept) if old in self.expanded} if known else set()
        self._open = set()
        self._ranked = []

    def refresh(self, tree: SpeculationTree, max_depth: int) -> None:
        """The tree has changed. max_depth: deepest useful level."""

    def needed(self, tree: SpeculationTree) -> list[int] | None:
        """After a commit: the nodes that remain useful, parents before children; None if all do."""
        del tree
        return None

    def selected(self, tree: SpeculationTree) -> Sequence[int]:
        """Nodes that may be proposed, parents before children."""
        return range(len(tree))


class RootFrontier(Frontier):
    """The frontier of a drafter that grows a tree once after each commit: only the root is expanded."""

    @property
    def expandable(self) -> bool:
        """True if the root can be expanded."""
        return not self.root_expanded and self.held and not self.blocked


def best_of_merged(tree: SpeculationTree, shape: TreeShape) -> list[int]:
    """The nodes to propose of an explicit tree that several drafters grow: the best ones that a target with the shape's
    flags verifies, and the best ones for a target without them."""
    count = shape.rows - 1
    return sorted({*tree.best_nodes(count, shape.steps, shape.topk), *tree.best_nodes(count)})


class BlockFrontier(RootFrontier):
    """The frontier of a drafter whose expansion of the root is the whole tree."""

    def __init__(self, shape: TreeShape | None, *, merged: bool) -> None:
        """shape: of explicit trees, of which the best nodes are proposed together, those of another drafter among them.

        merged: another drafter grows the same tree.
        """
        super().__init__(0, 1.0, from_parents=True)
        self._shape = shape
        self._merged = merged

    def offer(self, tree: SpeculationTree, node: int) -> None:
        """Nothing to do: only the root is expanded."""

    def selected(self, tree: SpeculationTree) -> Sequence[int]:
        """All nodes; of an explicit tree the best ones, once it is complete."""
        if self._shape is None:
            return range(len(tree))
        alone = self._merged and not self.held  # only the other drafter grows this tree
        if not self.root_expanded and not alone:
            return []
        return best_of_merged(tree, self._shape) if self._merged else sorted(tree.best_nodes(self._shape.rows - 1))
