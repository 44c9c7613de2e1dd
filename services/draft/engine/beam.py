"""Explicit trees, grown as SGLang grows EAGLE-2's: level by level, a beam of K nodes, the best N - 1 of all candidates.

    level 0    the root's K children; all of them are the beam
    level i    each node of the beam gets K children; the best K of these K * K are the next beam
    choice     the N - 1 best candidates of all levels are proposed at once, in the order of flat numbers

A candidate's score is the product of probabilities along its path. Flat numbers count candidates level by level, in the
order of the beam and of each node's children. Ties go to the lower number, so parents stand before their children.
Nothing is drafted ahead: the next tree begins with the next commit. Known nodes are not computed again.

Where n-grams grow the same tree, they expand first, and the best N - 1 of all nodes are proposed. Their nodes may be in
the beam, too, unless one program grows a head's whole tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.frontier import Frontier, best_of_merged
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS


class BeamFrontier(Frontier):
    """The main drafter's frontier in a tree of fixed shape."""

    def __init__(self, shape: TreeShape, *, lasting: bool, merged: bool = False) -> None:
        """lasting: a node's children remain valid when the node is committed.

        merged: another drafter grows the same tree.
        """
        super().__init__(shape.expansions, 1.0, from_parents=True)
        self.shape = shape
        self._lasting = lasting
        self._merged = merged
        self._missing: list[int] = []  # nodes of the beam that are not expanded
        self._candidates: list[int] = []  # by flat number, as far as they are known
        self._whole = False  # the tree was added as it will be proposed

    @property
    def complete(self) -> bool:
        """True if every node of the beam is expanded."""
        return self.root_expanded and not self._missing

    @property
    def expandable(self) -> bool:
        """True if there is a node to expand."""
        return self.held and (bool(self._missing) if self.root_expanded else not self.blocked)

    def best_leaves(self, tree: SpeculationTree, count: int) -> list[tuple[float, int]]:
        """Nodes of the beam, or the root; all are needed, regardless of their probability."""
        del tree
        if not self.expandable:
            return []
        return [(0.0, node) for node in (self._missing[:count] if self.root_expanded else [ROOT])]

    def mark_expanded(self, tree: SpeculationTree, node: int) -> list[int]:
        """A node, or the root, was expanded."""
        super().mark_expanded(tree, node)
        return []

    def offer(self, tree: SpeculationTree, node: int) -> None:
        """Nothing to do: the beam decides which nodes are expanded."""

    def reset(self) -> None:
        """Nothing is expanded."""
        super().reset()
        self._missing, self._candidates, self._whole = [], [], False

    @property
    def accepts_whole_tree(self) -> bool:
        """True if trees do not survive commits, and the present one is empty."""
        return not self._lasting and not self.root_expanded

    @property
    def accepts_growth(self) -> bool:
        """False: the shape decides which nodes are expanded."""
        return False

    def mark_complete(self) -> None:
        """A whole tree was added."""
        super().mark_complete()
        self._whole = True

    def renumber(self, kept: list[int], *, root_expanded: bool) -> None:
        """The root has moved down."""
        self._whole = False
        super().renumber(kept, root_expanded=root_expanded and self._lasting)

    def refresh(self, tree: SpeculationTree, max_depth: int) -> None:
        """Compute the beam and the candidates of the present tree. max_depth: deepest useful level."""
        if self._whole:
            self._candidates, self._missing = list(range(len(tree))), []
            return
        score = tree.path_score
        beam = list(tree.root_children) if self.root_expanded else []
        self._candidates, self._missing = list(beam), []
        if self._merged:  # the root may have more children than this drafter's K
            beam = self._best(score, beam)
        for _ in range(1, min(self.shape.steps, max_depth)):
            self._missing = [node for node in beam if node not in self.expanded][: self._room]
            level = [child for node in beam if node in self.expanded for child in tree.children_of(node)]
            self._candidates += level
            if self._missing:
                return
            beam = self._best(score, level)

    def _best(self, score: Sequence[float], nodes: list[int]) -> list[int]:
        return sorted(nodes, key=lambda node: -score[node])[: self.shape.topk]  # sorting is stable

    @property
    def _room(self) -> int:
        """Number of nodes that may still be expanded; nodes of another drafter may move the beam to further ones."""
        return max(SCRATCH_SLOTS, self.shape.expansions) - len(self.expanded)

    def needed(self, tree: SpeculationTree) -> list[int]:
        """Nodes of the tree, parents before children, and known nodes below them.

        The latter are kept while a whole tree has room beside them; a node that loses its children is expanded again.
        """
        kept, expanded = set(self._candidates), set[int]()
        room = max(SCRATCH_SLOTS - self.shape.expansions, 0)
        known = [node for node in self._candidates if node in self.expanded]
        for node in known:
            children = tree.children_of(node)
            if not kept.issuperset(children):
                if not room:
                    continue
                room -= 1
                kept.update(children)
                known += [child for child in children if child in self.expanded]
            expanded.add(node)
        self.expanded = expanded
        return sorted(kept)

    def selected(self, tree: SpeculationTree) -> list[int]:
        """The nodes to propose, by flat number; none before the tree is complete."""
        alone = self._merged and not self.held  # only the other drafter grows this tree
        if not self.complete and not alone:
            return []
        if self._merged:
            return best_of_merged(tree, self.shape)
        score, candidates = tree.path_score, self._candidates  # parents come before children
        flat = sorted(range(len(candidates)), key=lambda i: -score[candidates[i]])
        return [candidates[i] for i in sorted(flat[: self.shape.rows - 1])]
