"""NEXTN with several MTP layers, each of which predicts a token further: trees are as deep as there are layers."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.tree import ROOT
from services.draft.drafters.base import Growth, Wish
from services.draft.drafters.feature import FeatureDrafter


class StackedDrafter(FeatureDrafter):
    """Drafts from the target's features alone; nodes further ahead of them than there are layers have no children."""

    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """As of FeatureDrafter."""
        deep = [wish for wish in wishes if self._layer(wish) >= self.runner.stacked]
        near = [wish for wish in wishes if self._layer(wish) < self.runner.stacked]
        return [Growth(wish.session, wish.node, (), (), ()) for wish in deep] + (super().grow(near) if near else [])

    def _layer(self, wish: Wish) -> int:
        """The layer that predicts a node's children: by how far the node is ahead of the last feature."""
        if wish.node == ROOT:
            return 0
        session = wish.session
        ahead = session.length - 1 - self.trunks[session.id].settled
        return ahead + session.tree.depth[wish.node]
