"""Times in which no target is up: how long sessions may wait, and the errors of those that cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.admission.retry_after import MAX_SECONDS, bounded
from gateway.pools.placement import Placement
from gateway.streams.availability import UNUSABLE
from gateway.streams.target import TargetLink
from outrider.errors import Unavailable

# Seconds for which open sessions wait while all targets are refused: one of them may be restarted.
_REFUSED_GRACE = 5.0


class TargetAbsence:
    """The absence of all targets of a model. Lives in one event loop."""

    def __init__(self, placement: Placement, resume_timeout: float, model: str) -> None:
        """resume_timeout: seconds for which sessions wait for a target. model: empty for the gateway's only one."""
        self._placement = placement
        self._resume_timeout = resume_timeout
        self._model = model
        self._since: float | None = None  # by the event loop's clock; None while a target is up
        self._refused_since: float | None = None  # by the same clock; None while a target may serve

    def began(self) -> None:
        """The last target that was up is lost."""
        self._since = asyncio.get_running_loop().time()

    def ended(self) -> None:
        """A target is up."""
        self._since = None

    def check(self) -> None:
        """Raise Unavailable if a new session would wait in vain, or targets have been away for too long."""
        if (error := self.none_usable() or self.all_refused()) is not None:
            raise error
        if all(target.draining for target in self._placement.targets):
            message = f"{self._owner} has no target: its pool is empty; add one with POST /workers, or retry later"
            raise Unavailable(message, retry_after=bounded(self._seconds))
        if self._since is not None and self._seconds >= self._resume_timeout:
            raise self.too_long()

    def none_usable(self) -> Unavailable | None:
        """The error of sessions if targets lack weights, and no other may come: waiting would not help. None otherwise.

        A target that is refused for another reason may be restarted at any moment, so open sessions wait for a while.
        """
        targets = self._unusable()
        version = next((target.awaited_version for target in targets if target.awaited_version is not None), None)
        if version is None:
            return None
        message = (
            f'no target has the weights "{version}", which this gateway serves; they must be sent again with '
            "/update_weights_from_disk or /update_weights_from_tensor"
        )
        return Unavailable(message, retry_after=MAX_SECONDS)

    def all_refused(self) -> Unavailable | None:
        """The error while no target of the pool fits, so that requests would wait in vain; None if one may serve."""
        targets = self._unusable()
        if not targets:
            return None
        others = f" (of {len(targets)} targets none fits)" if len(targets) > 1 else ""
        message = (
            f"{self._owner} has no target that fits: {targets[0].availability.reason}{others}; start one that does, or "
            "retry later"
        )
        return Unavailable(message, retry_after=bounded(self._seconds))

    def refused_for_long(self) -> Unavailable | None:
        """As `all_refused`, once that has lasted; called after each attempt to use a target that failed."""
        error, now = self.all_refused(), asyncio.get_running_loop().time()
        if error is None:
            self._refused_since = None
            return None
        if self._refused_since is None:
            self._refused_since = now
        return error if now - self._refused_since >= _REFUSED_GRACE else None

    def too_long(self) -> Unavailable:
        """The error of sessions that no target came back for in time."""
        of_model = f" of the model `{self._model}`" if self._model else ""
        message = f"no target service{of_model} came back in {self._resume_timeout:.0f} s; retry later"
        return Unavailable(message, retry_after=bounded(self._seconds))

    def _unusable(self) -> Sequence[TargetLink]:
        """All targets of the pool if each of them must be restarted, or sent weights; none otherwise."""
        targets = [target for target in self._placement.targets if not target.draining]
        return targets if all(target.availability.state in UNUSABLE for target in targets) else []

    @property
    def _owner(self) -> str:
        return f"the model `{self._model}`" if self._model else "the gateway"

    @property
    def _seconds(self) -> float:
        """Seconds for which no target has been up; 0 if one is."""
        return 0.0 if self._since is None else asyncio.get_running_loop().time() - self._since
