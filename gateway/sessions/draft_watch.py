"""The draft tree of a session as the gateway sees it, for clients that ask for a report of every step.

The gateway relays proposals as bytes. For a watched session it also merges them into a tree, as the target does, and
reports at each commit the path that the draft service scored highest. The target may have accepted only a part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import ROOT, SpeculationTree
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

_MAX_PATH = 16  # draft tokens that a report shows per step


class DraftWatch:
    """Follows proposals and commits of one session."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: prompt and committed tokens, at least one."""
        self._tree = SpeculationTree(np.array(tokens, np.uint32))

    def merge(self, proposal: Proposal) -> None:
        """Add a proposal of the draft service."""
        self._tree.merge(proposal)

    def commit(self, tokens: Sequence[int], *, drafted: bool) -> tuple[int, ...]:
        """Add committed tokens. Returns the path that the draft service scored highest; nothing without its drafts.

        Where the target accepted more of another path, the accepted tokens take its place. drafted: the step verified
        draft tokens of the draft service
        """
        path = self._best_path(tokens[:-1]) if drafted else ()
        self._tree.commit(np.array(tokens, np.uint32))
        return path

    def _best_path(self, accepted: Sequence[int]) -> tuple[int, ...]:
        """The accepted tokens as far as the tree has them, then the nodes of the highest score."""
        tree, node = self._tree, ROOT
        path: list[int] = []
        for token in accepted:
            child = next((child for child in tree.children_of(node) if tree.token[child] == token), None)
            if child is None:
                return tuple(path)
            path.append(token)
            node = child
        while len(path) < _MAX_PATH and (children := tree.children_of(node)):
            node = max(children, key=tree.log_score.__getitem__)
            path.append(tree.token[node])
        return tuple(path)


class DraftWatches(dict[int, DraftWatch]):
    """The watches of all watched sessions, by session id."""

    def merge(self, batch: common_pb2.ProposalBatch) -> None:
        """Add the proposals of a frame, which is not decoded while no session is watched. Raises InvalidRequest."""
        if not self:
            return
        for proposal in codec.proposals_from_pb(batch):
            if (watch := self.get(proposal.session_id)) is not None:
                watch.merge(proposal)
