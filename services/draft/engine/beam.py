"""Explicit trees, grown as SGLang grows EAGLE-2's: level by level, a beam of K nodes, the best N - 1 of all candidates.

    level 0    the root's K children; all of them are the beam
    level i    each node of the beam gets K children; the best K of these K * K are the next beam
    choice     the N - 1 best candidates of all levels are proposed at once, in the order of flat numbers

A candidate's score is the product of probabilities along its path. Ties go to the lower flat number, which counts
candidates level by level, in the order of the beam and of each node's children; so no child stands before its parent.
Nothing is drafted ahead: the next tree begins with the next commit. What of it is known already is not computed again.

Where n-grams grow the same tree, they come first, and the best N - 1 of all nodes are proposed. Their nodes may be in
the beam, too, unless a head's tree comes whole from one program.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.shape import TreeShape
from outrider.speculation.tree import ROOT, SpeculationTree
from services.draft.sessions.frontier import Frontier
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS


class BeamFrontier(Frontier):
    """The main drafter's view of a tree whose shape is fixed."""

    def __init__(self, shape: TreeShape, *, lasting: bool, merged: bool = False) -> None:
        """lasting: what is known of a node's children stays true when the node is committed.

        merged: another drafter grows the same tree.
        """
        super().__init__(shape.expansions, 1.0, from_parents=True)
        self.shape = shape
        self._lasting = lasting
        self._merged = merged
        self._missing: list[int] = []  # nodes of the beam that have no children yet
        self._candidates: list[int] = []  # by flat number, as far as they are known
        self._whole = False  # the tree was planted as it is to be proposed

    @property
    def complete(self) -> bool:
        """True if nothing of the tree is missing."""
        return self.root_expanded and not self._missing

    @property
    def wants(self) -> bool:
        """True if there is something to expand."""
        return self.held and (bool(self._missing) if self.root_expanded else not self.blocked)

    def wishes(self, tree: SpeculationTree, count: int) -> list[tuple[float, int]]:
        """Nodes of the beam, or the root; all are needed, however likely they are."""
        del tree
        return [(0.0, node) for node in (self._missing[:count] if self.root_expanded else [ROOT])] if self.wants else []

    def mark(self, tree: SpeculationTree, node: int) -> list[int]:
        """A node, or the root, is expanded now."""
        super().mark(tree, node)
        return []

    def enter(self, tree: SpeculationTree, node: int) -> None:
        """Which nodes are expanded is a matter of the beam."""

    def reset(self) -> None:
        """Nothing is expanded."""
        super().reset()
        self._missing, self._candidates, self._whole = [], [], False

    @property
    def takes_whole(self) -> bool:
        """True if nothing of a tree outlasts a commit, and none of it is there."""
        return not self._lasting and not self.root_expanded

    def finish(self) -> None:
        """All of the tree has been planted."""
        super().finish()
        self._whole = True

    def renumber(self, kept: list[int], *, root_expanded: bool) -> None:
        """The root has moved down."""
        self._whole = False
        super().renumber(kept, root_expanded=root_expanded and self._lasting)

    def survey(self, tree: SpeculationTree, max_depth: int) -> None:
        """Go over the tree as far as it is known. max_depth: of nodes worth having, in levels."""
        if self._whole:
            self._candidates, self._missing = list(range(len(tree))), []
            return
        score = tree.path_score
        beam = list(tree.root_children) if self.root_expanded else []
        self._candidates, self._missing = list(beam), []
        if self._merged:  # more than the K children of this drafter's
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
        """Nodes that may still be expanded: where another drafter's come meanwhile, the beam moves on to others."""
        return max(SCRATCH_SLOTS, self.shape.expansions) - len(self.expanded)

    def needed(self, tree: SpeculationTree) -> list[int]:
        """Nodes that the tree is made of, parents before children, and what is known below them.

        That is kept as far as there is room beside a whole tree; what loses its children is to be expanded anew.
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

    def chosen(self, tree: SpeculationTree) -> list[int]:
        """The nodes to propose, by flat number; none before all is known."""
        alone = self._merged and not self.held  # the other drafter's nodes are all that will come
        if not self.complete and not alone:
            return []
        score = tree.path_score
        candidates = range(len(tree)) if self._merged else self._candidates  # both have parents before children
        flat = sorted(range(len(candidates)), key=lambda i: -score[candidates[i]])
        return [candidates[i] for i in sorted(flat[: self.shape.rows - 1])]
