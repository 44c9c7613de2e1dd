"""NEXTN with several MTP layers, each of which predicts one token further: trees are as deep as there are layers."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.speculation.tree import ROOT
from services.draft.drafters.base import ExpandRequest, Expansion
from services.draft.drafters.feature import FeatureDrafter


class StackedDrafter(FeatureDrafter):
    """Drafts from the target's features alone; nodes deeper than the layers reach get no children."""

    def expand(self, requests: Sequence[ExpandRequest]) -> list[Expansion]:
        """As of FeatureDrafter."""
        deep = [request for request in requests if self._layer(request) >= self.runner.stacked]
        near = [request for request in requests if self._layer(request) < self.runner.stacked]
        childless = [Expansion(request.session, request.node, (), (), ()) for request in deep]
        return childless + (super().expand(near) if near else [])

    def _layer(self, request: ExpandRequest) -> int:
        """Index of the layer that predicts a node's children: the node's distance from the last feature."""
        if request.node == ROOT:
            return 0
        session = request.session
        ahead = session.length - 1 - self.prefix_kvs[session.id].settled
        return ahead + session.tree.depth[request.node]
