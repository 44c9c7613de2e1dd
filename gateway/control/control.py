"""Control of the services: caches, pauses, memory, and weights. Every call goes to all targets or drafts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Literal

from gateway.control.calls import CALL_TIMEOUT, Services, raise_first
from gateway.control.server_info import Facts
from gateway.control.weight_updates import WeightUpdates
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.errors import InvalidRequest, OutriderError
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2

PauseMode = Literal["abort", "retract", "in_place"]

_MODES: dict[PauseMode, common_pb2.PauseMode] = {
    "abort": common_pb2.PAUSE_MODE_ABORT,
    "retract": common_pb2.PAUSE_MODE_RETRACT,
    "in_place": common_pb2.PAUSE_MODE_IN_PLACE,
}
_LAST_CLOSES = 0.2  # seconds; closes of cancelled requests reach a target over another connection than the flush
_FIRST_POLL, _LONGEST_POLL = 0.02, 0.5  # seconds between two attempts to flush


class Control:
    """Controls all targets and drafts together. services, weights: calls of them, and updates of their weights."""

    def __init__(self, orchestrator: Orchestrator, facts: Facts) -> None:
        """facts: about the served model; updated with the weights."""
        self.services, self._facts = Services(orchestrator), facts
        self._paused = False  # as a client asked for it last
        self._flushed = False  # as a client asked for it
        self._update: bool | None = None  # None: none is open; True: generation is paused for the open one alone
        self.weights = WeightUpdates(self.services, facts)
        links: list[TargetLink | DraftLink] = [*orchestrator.targets, *orchestrator.drafts]
        for link in links:
            self.prepare(link)

    def prepare(self, link: TargetLink | DraftLink) -> None:
        """Make a replica, before it is used, take part in pauses, flushes and weight updates so far."""
        self.weights.prepare(link)
        if isinstance(link, DraftLink):
            if self._flushed:  # it may have been in the pool before
                link.flush_later(draft_pb2.FlushDraftRequest())
            return
        link.flush_due = self._flushed
        others = [target for target in self.services.targets if target is not link]
        # Another gateway may have let the targets continue, which their reports show.
        if self._paused and (not others or any(target.paused for target in others)):
            link.set_paused(True)

    def retire(self, successor: Control | None) -> None:
        """Replicas that join from now on are not this one's to pause or flush, but its successor's, if that is up."""
        if successor is not None:
            successor._paused, successor._flushed = self._paused, self._flushed
            successor._update = self._update
        self._paused = self._flushed = False
        self._update = None

    async def flush_cache(self, timeout_s: float = 0.0) -> None:
        """Drop cached prefixes, and the n-grams of drafts.

        timeout_s: seconds to wait for requests to end. Raises InvalidRequest if some are still running then.
        """
        self._flushed = True
        await self._flush_targets(time.monotonic() + max(timeout_s, _LAST_CLOSES))
        raise_first(await self.services.flush_drafts(draft_pb2.FlushDraftRequest()))

    async def _flush_targets(self, deadline: float) -> None:
        """Flush until no target refuses, at growing intervals, because each attempt interrupts the engines."""
        pause = _FIRST_POLL
        while True:
            try:
                await self.services.call_targets(
                    lambda stub: stub.FlushCache(target_pb2.FlushCacheRequest(), timeout=CALL_TIMEOUT)
                )
            except InvalidRequest:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
            else:
                return
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_POLL)

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating, also beyond an open update. A target that is away is paused before it is used again."""
        await self._keep_pause()
        await self._pause(mode)

    async def _pause(self, mode: PauseMode) -> None:
        await self._set_paused(True)
        request = target_pb2.PauseGenerationRequest(mode=common_pb2.PauseMode.Name(_MODES[mode]))
        await self.services.call_targets(lambda stub: stub.PauseGeneration(request, timeout=CALL_TIMEOUT))

    async def resume(self) -> None:
        """Continue generating. A target that is away continues before it is used again."""
        await self._keep_pause()
        await self._resume()

    async def _resume(self) -> None:
        await self._set_paused(False)
        request = target_pb2.ContinueGenerationRequest()
        await self.services.call_targets(lambda stub: stub.ContinueGeneration(request, timeout=CALL_TIMEOUT))

    @property
    def update_open(self) -> bool:
        """True between the beginning and the end of an update of several parts."""
        return self._update is not None

    async def begin_update(self) -> None:
        """Open an update of several parts: generation is paused until its end, so that no token comes from half of it.

        Raises InvalidRequest if one is open, Unavailable.
        """
        if self._update is not None:
            raise InvalidRequest("an update of the weights is open already; end it with POST /end_weight_update")
        await self._set_update(not self._paused)
        if self._update:
            try:
                await self._pause("in_place")
            except OutriderError:
                with contextlib.suppress(OutriderError):
                    await self.end_update()
                raise

    async def end_update(self) -> None:
        """Close the update; generation continues unless a client paused it. Raises InvalidRequest if none is open."""
        if self._update is None:
            raise InvalidRequest(
                "no update of the weights is open, or the gateway has restarted since; POST /begin_weight_update opens "
                "one, POST /continue_generation ends a pause"
            )
        paused = self._update
        await self._set_update(None)
        if paused:
            await self._resume()

    async def _keep_pause(self) -> None:
        """A client sets or ends the pause itself: the end of an open update leaves it so."""
        if self._update:
            await self._set_update(False)

    async def _set_update(self, update: bool | None) -> None:
        self.adopt_update(update)
        await self._facts.peers.ask("update", update)

    def adopt_update(self, update: bool | None) -> None:
        """Set whether an update is open, and whether generation is paused for it alone."""
        self._update = update

    async def release_memory(self) -> int:
        """Let the targets return the memory of their KV caches. Returns its size, in bytes. Raises InvalidRequest."""
        request = target_pb2.ReleaseMemoryRequest()
        found = await self.services.call_targets(lambda stub: stub.ReleaseMemory(request, timeout=CALL_TIMEOUT))
        return sum(one.released_bytes for one in found)

    async def resume_memory(self) -> None:
        """Let the targets take memory again."""
        request = target_pb2.ResumeMemoryRequest()
        await self.services.call_targets(lambda stub: stub.ResumeMemory(request, timeout=CALL_TIMEOUT))

    async def _set_paused(self, paused: bool) -> None:
        self.adopt_pause(paused)
        await self._facts.peers.ask("pause", paused)

    def adopt_pause(self, paused: bool) -> None:
        """Set whether targets are paused before they are used again."""
        self._paused = paused
        for target in self.services.targets:
            target.set_paused(paused)
