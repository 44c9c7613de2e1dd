"""Links to the members of the pools: made when a replica joins, detached when it leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from gateway.control.control import Control
from gateway.orchestration.orchestrator import Orchestrator
from gateway.pools.addresses import Kind
from gateway.pools.discovery import Discovery
from gateway.pools.members import Member, Service
from gateway.streams.connection import Connection
from gateway.streams.draft import DraftLink
from gateway.streams.pool_weights import PoolWeights
from gateway.streams.target import TargetLink
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

AnyLink = TargetLink | DraftLink


class Links:
    """Follows the members of both pools. Lives in one event loop.

    changed: set after the state of a link, or a pool, has changed, for the wait for the first target
    on_late: starts the work that a replica needs which joins while the gateway serves
    on_early_files: called with the tokenizer's files of a target that still loads its model
    """

    def __init__(
        self,
        discovery: Discovery,
        orchestrator: Orchestrator,
        connection: Connection,
        *,
        report: Callable[[], None] = lambda: None,
        strict: bool = True,
        model_path: str = "",
    ) -> None:
        """report: called after the state of a link, or a pool, has changed. strict: a target that a flag names must fit
        when the gateway starts. model_path: checkpoint that targets must serve; empty for any
        """
        self._strict = strict
        self._model_path = model_path
        self._discovery = discovery
        self._orchestrator = orchestrator
        self._connection = connection
        self._control: Control | None = None  # once the gateway serves
        self._weights: PoolWeights | None = None  # once the first target is up
        self._first_drafts: list[DraftLink] = []
        self._leaving: dict[AnyLink, asyncio.Task[None]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self._were_up: set[AnyLink] = set()
        self.changed = asyncio.Event()
        self._report = report
        self.on_late: Callable[[AnyLink], Coroutine[Any, Any, None]] = _nothing
        self.on_early_files: Callable[[dict[str, bytes]], None] = lambda _: None

    def start(self) -> None:
        """Find replicas, and connect to targets. Drafts wait until `serve`: they must fit the first target's model."""
        self._discovery.members.on_join, self._discovery.members.on_leave = self._joined, self._left
        for member in self._discovery.members.of(Service.TARGET):
            self._joined(member)
        self._discovery.start()

    @property
    def targets_are_fixed(self) -> bool:
        """True if flags name targets, by address alone."""
        names = self._discovery.members.names(Service.TARGET)
        return bool(names) and all(named.kind is Kind.ADDRESS for named in names)

    @property
    def any_target(self) -> bool:
        """True if the pool of targets has a member."""
        return bool(self._discovery.members.of(Service.TARGET))

    def is_named(self, link: AnyLink) -> bool:
        """True if a flag names exactly this address, so that it must fit when the gateway starts."""
        member = self._discovery.members.find(Service(link.service), link.address)
        return self._strict and member is not None and member.named

    def expect(self, first: TargetLink) -> None:
        """From now on all targets must fit this one. Raises ConfigError for one that a flag names and that does not."""
        assert first.info is not None, "a link that is up has info"
        self._weights = PoolWeights(first.info)
        for link in self._orchestrator.targets:
            self._expect(link, self._weights)

    def serve(self, control: Control) -> None:
        """Make the links to the drafts, for `start_drafts`. Replicas that join from now on are late."""
        for member in self._discovery.members.of(Service.DRAFT):
            self._joined(member)
        self._control = control
        self._first_drafts = list(self._orchestrator.drafts)
        for draft in self._first_drafts:
            control.prepare(draft)

    def start_drafts(self) -> None:
        """Connect to the drafts that `serve` found and that have not left since."""
        for draft in self._first_drafts:
            if draft in self._orchestrator.drafts:
                draft.start()

    async def stop(self) -> None:
        """End what is under way; the orchestrator ends the links."""
        await self._discovery.stop()
        tasks = [*self._leaving.values(), *self._late]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _note_change(self) -> None:
        self.changed.set()
        self._report()

    # --- members ---

    def _joined(self, member: Member) -> None:
        pool = self._orchestrator.targets if member.service is Service.TARGET else self._orchestrator.drafts
        known = next((link for link in pool if link.address == member.address), None)
        if known is not None:  # it still drains
            self._keep(known)
            return
        link = self._link_to(member)
        if link is None:
            return
        link.rank = member.rank
        link.events.change = partial(self._link_changed, link)
        self._orchestrator.attach(link)
        self._note_change()
        if isinstance(link, TargetLink):
            if self._weights is not None:
                self._expect(link, self._weights)
            else:
                link.tokenizer.on_early = self.on_early_files
            link.start()
        if self._control is not None:
            self._control.prepare(link)
            if isinstance(link, DraftLink):
                link.start()
            task = asyncio.create_task(self.on_late(link), name=f"late {link.service} {link.address}")
            self._late.add(task)
            task.add_done_callback(self._late.discard)

    def _left(self, member: Member, drain: bool) -> None:
        link = next(
            (o for o in self._orchestrator.links if (o.service, o.address) == (member.service, member.address)), None
        )
        if link is not None and (not drain or link not in self._leaving):
            if link in self._leaving:  # at once, after all
                self._leaving[link].cancel()
            self._leaving[link] = asyncio.create_task(self._leave(link, drain), name=f"leave {link.address}")

    async def _leave(self, link: AnyLink, drain: bool) -> None:
        if drain and isinstance(link, TargetLink):
            await self._orchestrator.drain(link)
        self._leaving.pop(link, None)
        self._were_up.discard(link)
        await self._orchestrator.detach(link)
        self._note_change()

    def _keep(self, link: AnyLink) -> None:
        """A replica that drains joins its pool again."""
        if (task := self._leaving.pop(link, None)) is not None:
            task.cancel()
        if isinstance(link, TargetLink):
            self._orchestrator.readmit(link)
        self._note_change()

    # --- links ---

    def _link_to(self, member: Member) -> AnyLink | None:
        connection = self._connection.named(member.host) if member.host else self._connection
        if member.service is Service.TARGET:
            target = TargetLink(member.address, connection)
            target.model_path = self._model_path
            return target
        weights = self._weights
        return DraftLink(member.address, weights.model, connection) if weights is not None else None

    def _expect(self, link: TargetLink, weights: PoolWeights) -> None:
        try:
            link.expect(weights)
        except ConfigError:
            if self.is_named(link):
                raise
            link.reconnect()  # its next handshake refuses it

    def _link_changed(self, link: AnyLink) -> None:
        if link.up:
            self._were_up.add(link)
        elif link in self._were_up:
            self._were_up.discard(link)
            self._discovery.look_now(Service(link.service))
        self._note_change()


async def _nothing(link: AnyLink) -> None:
    """The default of `on_late`."""
    del link
