"""A session as the draft engine holds it: its tokens, its draft tree, and the state of its drafters in it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import UNLIMITED_DRAFT, Proposal
from outrider.speculation.tree import SpeculationTree
from services.draft.sessions.claims import ClaimModels
from services.draft.sessions.features import FeatureRows
from services.draft.sessions.frontier import Frontier, TreeLimits
from services.draft.sessions.noise_keys import NoiseKeys
from services.draft.sessions.outbox import ProposalOutbox
from services.draft.sessions.tree_grower import TreeGrower


class SpanStart(NamedTuple):
    """Facts of a session's beginning, for its trace. time: in nanoseconds; length: committed tokens."""

    traceparent: str
    time: int
    length: int


class DraftSession:
    """Tokens and draft tree of one session, owned by the engine's thread.

    frontiers:    of its drafters, the main one's last
    draft_budget: nodes that the target can verify, as of the last commit; 0 pauses drafting
    queue_order:  waiting sessions are admitted in ascending order
    replied:      the last commit was followed by a proposal, perhaps an empty one
    """

    def __init__(
        self,
        request: OpenSession,
        limits: TreeLimits,
        eos_token_ids: tuple[int, ...],
        frontiers: Sequence[Frontier] = (),
        queue_order: int = 0,
        models: ClaimModels | None = None,
    ) -> None:
        """frontiers: by default a single one that expands only below its own expansions. models: as of TreeGrower."""
        self.id = request.session_id
        self.queue_order = queue_order
        self.sampling = request.sampling
        self.cache_salt = request.cache_salt
        self.span_start = SpanStart(request.traceparent, time.time_ns(), len(request.tokens))
        self.tree = SpeculationTree(request.tokens, limits.nodes)
        self.frontiers = tuple(frontiers) or (Frontier(limits.nodes, limits.floor, from_parents=True),)
        self.grower = TreeGrower(
            self.tree, self.frontiers, limits, request.stop, eos_token_ids, request.prompt_length, models
        )
        self.draft_budget = 0 if request.drafting_paused else UNLIMITED_DRAFT
        self.replied = True
        self._replied_length = 0  # committed tokens when all drafters had replied last
        self.features = FeatureRows()
        self.noise_keys = NoiseKeys(request.sampling.seed)
        self.outbox = ProposalOutbox(self.id, self.tree)
        self._tokens = np.empty(len(request.tokens) + 256, dtype=np.uint32)
        self._tokens[: len(request.tokens)] = request.tokens

    @property
    def prompt_length(self) -> int:
        """Number of tokens of the prompt."""
        return self.grower.prompt_length

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return self.tree.length

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """Prompt and committed tokens, [length] uint32, a view."""
        return self._tokens[: self.length]

    # --- state of the main drafter ---

    @property
    def root_expanded(self) -> bool:
        """True if the main drafter has expanded the root."""
        return self.frontiers[-1].root_expanded

    @property
    def blocked(self) -> bool:
        """True if the main drafter cannot expand the root before the target's next features arrive."""
        return self.frontiers[-1].blocked

    @blocked.setter
    def blocked(self, blocked: bool) -> None:
        self.frontiers[-1].blocked = blocked

    def set_urgent(self, urgent: bool) -> None:
        """Set whether the main drafter expands the root even while drafting is paused."""
        self.frontiers[-1].urgent = urgent

    @property
    def rounds_waited(self) -> int:
        """Rounds since the main drafter last expanded a node of this session."""
        return self.frontiers[-1].rounds_waited

    # --- expansion ---

    @property
    def growing(self) -> bool:
        """True if a drafter may expand a node."""
        return any(map(self.expandable, range(len(self.frontiers))))

    def expandable(self, drafter: int) -> bool:
        """True if a drafter may expand a node. drafter: index of its frontier."""
        frontier = self.frontiers[drafter]
        return (
            frontier.expandable
            and (frontier.urgent or (self.draft_budget > 0 and self.grower.max_depth >= 1))
            and (not frontier.root_expanded or len(self.tree) < self.tree.capacity)
        )

    def best_leaves(self, count: int, drafter: int = -1) -> list[tuple[float, int]]:
        """Up to `count` nodes for a drafter to expand, as (log-probability to reach it, node), best first."""
        return self.frontiers[drafter].best_leaves(self.tree, count) if self.expandable(drafter) else []

    # --- commits ---

    def commit(self, tokens: NDArray[np.uint32], root_expanded: bool) -> list[int]:
        """Move the root down. Returns the old index of each surviving node, in its new order.

        root_expanded: the main drafter has expanded the new root; the others expand it again.
        """
        end = self.length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * end)
        self._tokens[self.length : end] = tokens
        self.outbox.enter_nodes()
        kept = self.tree.commit(tokens)
        self.outbox.renumber(kept)
        self.replied = not self.draft_budget  # the target waits for no proposal while drafting is paused
        self.grower.renumber(kept, root_expanded)
        needed = self.grower.prune()
        if needed is None:
            return kept
        self.outbox.clear()  # an explicit tree is proposed as a whole
        return [kept[i] for i in needed]

    def reset(self) -> None:
        """Drop the tree; the tokens remain."""
        self.tree.clear()
        self.outbox.clear()
        self.grower.clear()

    def regrow(self) -> None:
        """Drop the tree, because a better one will replace it. Nodes that the target knows are not sent again."""
        self.outbox.regrow()
        self.tree.clear()
        self.grower.clear()

    # --- proposals ---

    @property
    def nothing_to_send(self) -> bool:
        """True if no proposal is due before a message arrives."""
        return self.replied or (self.blocked and not self.root_expanded)

    def reply(self) -> list[Proposal]:
        """The new proposals; an empty one if the last commit has led to none and the root's children are known.

        While one of several drafters has yet to expand the root, the others' proposals are no reply to the last commit:
        a target that waits for a reply waits for all drafters.
        """
        proposals = self.proposals()
        awaits_root = self._awaits_root()
        if awaits_root and len(self.frontiers) > 1 and not self.replied:
            return [replace(proposal, committed_length=self._replied_length) for proposal in proposals]
        if not proposals and not self.replied and not awaits_root:
            proposals = self.outbox.empty()
        self.replied = self.replied or bool(proposals)
        self._replied_length = self.length
        return proposals

    def _awaits_root(self) -> bool:
        """True if a drafter will still expand the root, now or once features arrive."""
        return any(
            not frontier.complete and (self.expandable(drafter) or frontier.blocked)
            for drafter, frontier in enumerate(self.frontiers)
        )

    def proposals(self) -> list[Proposal]:
        """Proposals of the likely nodes that the target does not know, which then count as sent."""
        selected = self.frontiers[-1].selected(self.tree)
        return self.outbox.take(selected, self.grower.limits.log_floor, self.draft_budget)
