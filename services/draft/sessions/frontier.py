"""What one drafter has still to expand of a session's tree. Several drafters in one session have a frontier each.

    expanded    the drafter was asked for the node's children
    open        it may be asked: likely enough, not too deep, no end of the text

A drafter that computes a node from its parent's state (`from_parents`) is asked only below what it has expanded itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree


@dataclass(frozen=True)
class TreeLimits:
    """How far a tree grows.

    nodes: most nodes a session. depth: deepest node, in levels below the root. children: most children a node. floor:
    least probability that a node is reached, below which it is neither expanded nor sent. shape: of explicit trees.
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
    """One drafter's view of one tree; `held` while the drafter holds the session."""

    def __init__(self, expansions: int, floor: float, *, from_parents: bool) -> None:
        """expansions: most nodes of a tree that are expanded at a time. floor: least reach that is worth expanding."""
        self.held = False
        self.root_expanded = False
        self.blocked = False  # the root cannot be expanded before the target has said more
        self.urgent = False  # the root is to be expanded even if nobody wants hints
        self.rounds_waited = 0  # since it was last granted a wish
        self.expanded: set[int] = set()
        self._open: set[int] = set()
        self._expansions = expansions
        self._log_floor = math.log(floor)
        self._from_parents = from_parents

    def reset(self) -> None:
        """Nothing is expanded."""
        self.root_expanded = self.blocked = self.urgent = False
        self.expanded.clear()
        self._open.clear()

    @property
    def complete(self) -> bool:
        """True if there is something to say of the root, if only that nothing follows it."""
        return self.root_expanded

    @property
    def wants(self) -> bool:
        """True if there is something to expand."""
        if not self.root_expanded:
            return self.held and not self.blocked
        return self.held and bool(self._open) and len(self.expanded) < self._expansions

    def wishes(self, tree: SpeculationTree, count: int) -> list[tuple[float, int]]:
        """Up to `count` nodes to expand, as (log-probability to reach it, node), best first."""
        if not self.wants:
            return []
        if not self.root_expanded:
            return [(0.0, ROOT)]
        count = min(count, self._expansions - len(self.expanded))
        score = tree.path_score
        best = sorted((-score[node], node) for node in self._open)[:count]
        return [(-cost, node) for cost, node in best]

    @property
    def takes_whole(self) -> bool:
        """True if a whole tree may be planted at once."""
        return False

    def finish(self) -> None:
        """All of the tree has been planted."""
        self.root_expanded = True

    def mark(self, tree: SpeculationTree, node: int) -> list[int]:
        """A node, or the root, is expanded now. Returns the children that it had already."""
        if node == ROOT:
            self.root_expanded = True
        else:
            self.expanded.add(node)
            self._open.discard(node)
        return tree.children_of(node) if self._from_parents else []

    def enter(self, tree: SpeculationTree, node: int) -> None:
        """A node may be asked for, if this drafter can and it is likely enough."""
        if node in self.expanded or tree.path_score[node] < self._log_floor:
            return
        parent = tree.parent[node]
        if not self._from_parents or (self.root_expanded if parent == ROOT else parent in self.expanded):
            self._open.add(node)

    def renumber(self, kept: list[int], *, root_expanded: bool) -> None:
        """The root has moved down. kept: old index of each surviving node; those that are open enter anew."""
        self.root_expanded = root_expanded
        known = root_expanded or not self._from_parents  # else it begins anew at the root
        self.expanded = {new for new, old in enumerate(kept) if old in self.expanded} if known else set()
        self._open = set()

    def survey(self, tree: SpeculationTree, max_depth: int) -> None:
        """The tree has changed."""

    def needed(self, tree: SpeculationTree) -> list[int] | None:
        """After a commit: the nodes that are still of use, parents before children; None if all are."""
        del tree
        return None

    def chosen(self, tree: SpeculationTree) -> Sequence[int]:
        """Nodes that may be proposed, parents before children."""
        return range(len(tree))
