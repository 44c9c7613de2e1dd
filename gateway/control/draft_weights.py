"""Drafts follow the target's weights: after an update, each draft that shares some gets them too.

    update ──► goal ──► draft: has it, or loads the folder
                        or wants tensors: target.GetSharedWeights ──► draft.UpdateSharedWeights, part by part

This runs beside the update, whose caller does not wait for it. A draft that cannot take the weights costs speed, and
reports the reason; the next update, or the next handshake, tries again. Newer goals replace older ones.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from gateway.control.calls import call_replica
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import SHARE_TIMEOUT, DraftLink, DraftWeights
from gateway.streams.target import TargetLink
from outrider.errors import OutriderError, Unavailable
from outrider.transport.uploads import upload
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

log = logging.getLogger(__name__)


class Goal(NamedTuple):
    """The weights that drafts should have. folder: that an update read last; fingerprint: of the shared weights."""

    folder: str = ""
    fingerprint: str = ""
    version: str = ""


class DraftFollower:
    """Updates the drafts of one worker to the target's weights."""

    def __init__(self, orchestrator: Orchestrator, goal: Goal) -> None:
        self._orchestrator = orchestrator
        self._goal = goal
        self._tasks: dict[DraftLink, asyncio.Task[None]] = {}

    def prepare(self, draft: DraftLink) -> None:
        """Let a draft follow from its next handshake on."""
        draft.on_ready = self._follow

    @property
    def shared_tensors(self) -> list[str]:
        """Names of the tensors that any draft shares, for which targets keep copies of an update."""
        infos = [draft.info for draft in self._orchestrator.drafts if draft.info is not None]
        return sorted({name for info in infos for name in info.shared_tensors})

    def aim(self, goal: Goal) -> None:
        """The target has these weights now."""
        self._goal = goal
        for draft in list(self._orchestrator.drafts):
            self._follow(draft)  # one that is away follows from its next handshake on

    def _follow(self, draft: DraftLink) -> None:
        """Start, unless the draft shares nothing, or this is under way."""
        shares = draft.info is not None and bool(draft.info.shared_tensors)
        if not shares or not self._goal.fingerprint or draft in self._tasks:
            return
        task = self._tasks[draft] = asyncio.create_task(self._bring(draft), name=f"weights of {draft.address}")
        task.add_done_callback(lambda _: self._tasks.pop(draft, None))

    async def _bring(self, draft: DraftLink) -> None:
        goal: Goal | None = None
        while goal != self._goal:  # it may have changed meanwhile
            goal = self._goal
            draft.weights = DraftWeights(goal.version, "loading")
            try:
                async with asyncio.timeout(SHARE_TIMEOUT):
                    await self._update(draft, goal)
            except (OutriderError, TimeoutError) as error:
                reason = error.message if isinstance(error, OutriderError) else f"no end after {SHARE_TIMEOUT:.0f} s"
                draft.weights = DraftWeights(goal.version, "stale", reason)
                log.warning("the draft at %s keeps older weights of the target: %s", draft.address, reason)
            else:
                draft.weights = DraftWeights(goal.version, "current")

    async def _update(self, draft: DraftLink, goal: Goal) -> None:
        request = draft_pb2.FlushDraftRequest(
            weights_only=True, target_folder=goal.folder, shared_fingerprint=goal.fingerprint
        )
        answer = await _ask(draft, lambda stub: stub.FlushDraft(request, timeout=SHARE_TIMEOUT))
        if not answer.wants_tensors:
            return
        problem: OutriderError = Unavailable("no target is up that has these weights")
        for target in list(self._orchestrator.targets):
            if target.up:
                try:
                    await self._relay(target, draft, goal)
                except OutriderError as error:
                    problem = error
                else:
                    return
        raise problem

    async def _relay(self, target: TargetLink, draft: DraftLink, goal: Goal) -> None:
        """Stream the tensors from a target to a draft; no more than a few parts are here at a time."""
        assert draft.info is not None
        names = target_pb2.GetSharedWeightsRequest(names=draft.info.shared_tensors)

        async def send(target_stub: Any) -> None:
            parts = target_stub.GetSharedWeights(names, timeout=SHARE_TIMEOUT)
            first = await anext(aiter(parts), target_pb2.GetSharedWeightsResponse())
            if first.fingerprint != goal.fingerprint:
                raise Unavailable(f"the target at {target.address} has other weights by now")
            failed: list[BaseException] = []

            async def requests() -> AsyncIterator[draft_pb2.UpdateSharedWeightsRequest]:
                yield draft_pb2.UpdateSharedWeightsRequest(fingerprint=first.fingerprint, content=first.content)
                try:
                    async for part in parts:
                        yield draft_pb2.UpdateSharedWeightsRequest(content=part.content)
                except Exception as error:  # the draft then refuses a file that ends too early
                    failed.append(error)

            try:
                await _ask(draft, lambda stub: upload(stub.UpdateSharedWeights, requests(), SHARE_TIMEOUT))
            except OutriderError:
                if failed:
                    raise failed[0] from None
                raise
            finally:
                parts.cancel()

        await call_replica(target, target_pb2_grpc.TargetServiceStub, send)


async def _ask(draft: DraftLink, call: Any) -> Any:
    return await call_replica(draft, draft_pb2_grpc.DraftServiceStub, call)
