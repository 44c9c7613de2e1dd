"""The interface of all drafters, from tables of n-grams to models.

    open / close        a session begins and ends
    features_changed    hidden states of the target have arrived
    will_/did_commit    the root of a session's tree moves down
    expand              returns children of the likeliest leaves

The engine owns the trees and chooses the leaves; a drafter owns the state that its expansions need.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.serving.messages import EngineLoad
from outrider.telemetry import Progress, no_progress
from services.draft.drafters.shared_weights import SharedWeights
from services.draft.sessions.session import DraftSession


class ExpandRequest(NamedTuple):
    """A node (or ROOT) to expand. log_reach: log-probability that verification reaches it."""

    session: DraftSession
    node: int
    log_reach: float


class Expansion(NamedTuple):
    """N scored nodes below a node. parents: index among them, or -1 for the node itself.

    whole: they are all nodes of an explicit tree, to be proposed as they are
    places: by node, where the drafter keeps the row of one that it has expanded, or -1; empty if it expanded none
    """

    session: DraftSession
    node: int
    tokens: Sequence[int]
    parents: Sequence[int]
    log_scores: Sequence[float]
    whole: bool = False
    places: Sequence[int] = ()


class Drafter(ABC):
    """An algorithm that proposes tokens. Called from the engine thread only."""

    name: str
    features: FeatureSpec | None = None
    """The target's hidden states that it reads. Rows arrive in `session.features`, after their tokens' commits."""
    fusion: bytes = b""
    """The fusion layer that belongs to `features`, as FeatureSpec describes it."""
    eos_token_ids: tuple[int, ...] = ()
    max_session_tokens: int = 0
    """Longest supported session in tokens; 0 is without limit."""
    expansions: int = 64
    """Largest number of expanded nodes in a tree."""
    expansions_per_step: int = 1
    """Expansions in an engine step, over several rounds: many, where a round takes less time than sending its nodes."""
    min_reach: float = 0.0
    """Least probability that an expanded node is reached."""
    shared_weights: SharedWeights | None = None
    """Reloads the weights that it shares with the target; None without such weights."""
    drafts_ahead: bool = True
    """Trees grow while the target computes; else once after each commit, from their roots."""
    one_pass: bool = False
    """The expansion of the root is the whole tree; no other node is expanded."""
    from_parents: bool = True
    """A node can be expanded only below nodes that this drafter has expanded."""

    @abstractmethod
    def open(self, session: DraftSession) -> None:
        """Begin to draft for a session. Raises OutOfPages without room for it."""

    @abstractmethod
    def close(self, session: DraftSession) -> None:
        """Forget a session and release its pages."""

    def finished(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:  # noqa: B027  (most ignore it)
        """A session's last commit has arrived, with these tokens; `close` follows."""

    def late_features(self, block: FeatureBlock) -> None:  # noqa: B027
        """Hidden states of a closed session: commits are received before the states of their tokens."""

    @abstractmethod
    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """`count` tokens are about to be committed; `path` holds the nodes among them, from below the root on.

        Returns True if the new root's children are in the tree and valid. Raises OutOfPages without room to go on.
        """

    @abstractmethod
    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """The tree has been renumbered. kept: the old index of each surviving node, in its new order."""

    def features_changed(self, session: DraftSession) -> None:  # noqa: B027  (most drafters read no features)
        """`session.features` may have changed. Raises Unavailable if rows are missing."""

    @abstractmethod
    def expand(self, requests: Sequence[ExpandRequest]) -> list[Expansion]:
        """Expand the nodes that pay in one round. requests: best first, at least one."""

    def placed(self, session: DraftSession, nodes: Sequence[int | None], places: Sequence[int]) -> None:  # noqa: B027
        """The nodes of an expansion with places are in the tree. nodes: their indices, None for those left out."""

    def flush(self) -> None:  # noqa: B027  (a drafter may keep nothing)
        """Drop what is kept of texts for later sessions. Open sessions go on."""

    def outdate(self) -> None:
        """The target has other weights: drop what was computed with the old ones. Open sessions go on."""
        self.flush()

    @property
    def busy(self) -> bool:
        """True if there is background work."""
        return False

    def work(self) -> None:  # noqa: B027  (few drafters have any)
        """Do a small part of the background work; called once a step."""

    @abstractmethod
    def warm_up(self, report: Progress = no_progress) -> None:
        """Prepare for the first session. report: called with the progress."""

    def start(self) -> None:  # noqa: B027  (few drafters have threads)
        """Serving begins: start own threads."""

    def stop(self) -> None:  # noqa: B027
        """Serving has ended: end own threads."""

    def load(self) -> EngineLoad:
        """Pages, and tokens of the last round."""
        return EngineLoad()

    def check(self) -> None:  # noqa: B027  (a drafter without pages has nothing to audit)
        """Audit the pages. Raises EngineFault."""
