"""One session's draft as it looks from outside, for clients that want to see it.

The gateway passes hints on as they come. Of a session that is watched it keeps them in a tree, as the target does, and
tells at each commit which path the draft believed in most: its first tokens may have been accepted, the others not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.speculation.proposal import Proposal
from outrider.speculation.tree import ROOT, SpeculationTree
from outrider.wire import codec
from outrider.wire.v1 import common_pb2

_LONGEST = 16  # tokens of a guess that are told


class Watch:
    """Follows proposals and commits of one session."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: prompt and committed tokens, at least one."""
        self._tree = SpeculationTree(np.array(tokens, np.uint32))

    def proposed(self, proposal: Proposal) -> None:
        """The draft has said something."""
        self._tree.merge(proposal)

    def committed(self, tokens: Sequence[int], verified: int) -> tuple[int, ...]:
        """The target has committed tokens. Returns what the draft believed in most, if nodes were verified at all.

        Of a path that was accepted further than that, the accepted tokens come in its place.
        """
        guess = self._guess(tokens[:-1]) if verified else ()
        self._tree.commit(np.array(tokens, np.uint32))
        return guess

    def _guess(self, accepted: Sequence[int]) -> tuple[int, ...]:
        """The path that goes along what was accepted as far as that was known, and on to the likeliest nodes."""
        tree, node = self._tree, ROOT
        path: list[int] = []
        for token in accepted:
            child = next((child for child in tree.children_of(node) if tree.token[child] == token), None)
            if child is None:
                return tuple(path)
            path.append(token)
            node = child
        while len(path) < _LONGEST and (children := tree.children_of(node)):
            node = max(children, key=tree.log_score.__getitem__)
            path.append(tree.token[node])
        return tuple(path)


class Watches(dict[int, Watch]):
    """Those of all sessions that are watched, by session."""

    def see(self, batch: common_pb2.ProposalBatch) -> None:
        """A draft has said something. Frames stay whole as long as nobody is watched. Raises InvalidRequest."""
        if not self:
            return
        for proposal in codec.proposals_from_pb(batch):
            if (watch := self.get(proposal.session_id)) is not None:
                watch.proposed(proposal)
