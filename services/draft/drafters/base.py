"""What every drafter does, be it a table of n-grams or a model.

    open / close     a session comes and goes
    fed              hidden states of the target have come
    commit           the root of a session's tree has moved down
    grow             say what may follow the most promising nodes

The engine decides what is promising and keeps the trees; a drafter keeps what it needs to answer.
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
from services.draft.drafters.sharing import Sharing
from services.draft.sessions.session import DraftSession


class Wish(NamedTuple):
    """A node (or ROOT) whose children are wanted. log_reach: log-probability that verification gets there."""

    session: DraftSession
    node: int
    log_reach: float


class Growth(NamedTuple):
    """What may follow a node, as N scored nodes. parents: index among them, or -1 for the node itself.

    whole: they are all of an explicit tree that is proposed
    """

    session: DraftSession
    node: int
    tokens: Sequence[int]
    parents: Sequence[int]
    log_scores: Sequence[float]
    whole: bool = False


class Drafter(ABC):
    """An algorithm that proposes tokens. Called from the engine thread only."""

    name: str
    features: FeatureSpec | None = None
    """The target's hidden states that it feeds on. Rows come into `session.features`, after their tokens' commits."""
    fusion: bytes = b""
    """The fusion layer that belongs to `features`, as FeatureSpec describes it."""
    eos_token_ids: tuple[int, ...] = ()
    max_session_tokens: int = 0
    """Longest session that can be drafted for, in tokens; 0 is without limit."""
    expansions: int = 64
    """Most nodes of a tree that it has expanded at a time."""
    step_wishes: int = 1
    """Wishes that a step grants, in several rounds if need be: many where a round takes less than sending its nodes."""
    least_reach: float = 0.0
    """Least probability that a node is reached, below which it is not expanded."""
    sharing: Sharing | None = None
    """Takes what it shares with the target from other folders; None if it shares nothing, or cannot."""
    from_parents: bool = True
    """A node can be expanded only below nodes that it has expanded itself."""

    @abstractmethod
    def open(self, session: DraftSession) -> None:
        """Take a session on. Raises OutOfPages if there is no room for it now."""

    @abstractmethod
    def close(self, session: DraftSession) -> None:
        """Forget a session and free what it holds."""

    def ended(self, session: DraftSession, tokens: NDArray[np.uint32]) -> None:  # noqa: B027  (most hear no more of it)
        """A session's last commit has come, of these tokens; `close` follows."""

    def overtaken(self, block: FeatureBlock) -> None:  # noqa: B027
        """Hidden states of a session that is held no longer: commits go before the states that come with them."""

    @abstractmethod
    def will_commit(self, session: DraftSession, count: int, path: list[int]) -> bool:
        """`count` tokens are about to be committed; `path` are the tree's nodes among them, from below the root on.

        Returns True if the new root's children are in the tree already, as this drafter would give them now. Raises
        OutOfPages if there is no room to go on.
        """

    @abstractmethod
    def did_commit(self, session: DraftSession, kept: list[int]) -> None:
        """The tree has been renumbered. kept: the old index of each surviving node, in its new order."""

    def fed(self, session: DraftSession) -> None:  # noqa: B027  (most drafters are not fed)
        """`session.features` may have changed. Raises Unavailable if a part of them was lost."""

    @abstractmethod
    def grow(self, wishes: Sequence[Wish]) -> list[Growth]:
        """Grant those wishes that pay in one round. wishes: best first, at least one."""

    def flush(self) -> None:  # noqa: B027  (a drafter may keep nothing)
        """Forget what was kept of texts for later ones. Sessions go on."""

    @property
    def busy(self) -> bool:
        """True if it has work that is nobody's wish."""
        return False

    def work(self) -> None:  # noqa: B027  (few drafters have any)
        """Do a little of that work; called once a round."""

    @abstractmethod
    def warm_up(self, tell: Progress = no_progress) -> None:
        """Get ready before the first session. tell: called with how far that is."""

    def start(self) -> None:  # noqa: B027  (most drafters do nothing by themselves)
        """Serving begins: threads of its own may start."""

    def stop(self) -> None:  # noqa: B027
        """Serving is over: threads of its own end."""

    def load(self) -> EngineLoad:
        """Pages and work of the last round."""
        return EngineLoad()

    def check(self) -> None:  # noqa: B027  (a drafter without pages has nothing to audit)
        """Audit the pages. Raises EngineFault."""
