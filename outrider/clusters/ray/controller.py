"""What the controller actor does, again and again: compare the pool as it is with the pool as it should be.

    units      exist on the cluster in the number that the load calls for          (outrider/clusters/scaling.py)
    processes  run in their actors; a new actor, after a loss, has none            (`_start`)
    gateways   have the addresses of exactly these processes in their pools        (outrider/clusters/ray/members.py)

Every step looks at all of it afresh, so a controller that Ray has started again on another machine goes on where the
lost one was. Ray places units and starts actors; nothing here does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from outrider.clusters.load import Window, counters_of, draft_load, pool_load
from outrider.clusters.ray.member import STOP_SECONDS, Member
from outrider.clusters.ray.members import GatewayView, bring_in_line, remove_now
from outrider.clusters.ray.plan import Kind, PoolPlan
from outrider.clusters.ray.units import HostHandle, HostLost, Launch, Platform
from outrider.clusters.scaling import Load, Trend, decide
from outrider.config import TargetConfig
from outrider.errors import OutriderError

log = logging.getLogger(__name__)

LEAVE_SECONDS = 600.0  # for the sessions of a replica that leaves; then they are moved by force
_RETRY_SECONDS = 60.0  # between two starts of a process that its flags or files end
_MIN_WINDOW_SECONDS = 5.0  # over which proposals and steps are counted
_SCALED = (Kind.TARGET, Kind.DRAFT)


class Controller:
    """Keeps a pool as it should be. Lives in one event loop.

    members: the units that exist
    """

    def __init__(self, plan: PoolPlan, platform: Platform, clock: Callable[[], float] = time.monotonic) -> None:
        self._plan, self._platform, self._clock = plan, platform, clock
        self.members: list[Member] = []
        self._found = False
        self._trends = dict.fromkeys(_SCALED, Trend())
        self._loads = dict.fromkeys(_SCALED, Load(0))
        self._window = Window(max(plan.rules[Kind.DRAFT].up_seconds, _MIN_WINDOW_SECONDS))
        self._views: list[GatewayView] = []

    def of(self, kind: Kind) -> list[Member]:
        """The units of a kind that stay."""
        return [one for one in self.members if one.unit.kind is kind and one.leaving is None]

    async def step(self) -> None:
        """Look at everything once, and change what is not as it should be."""
        if not self._found:
            self.members = [Member(unit) for unit in await self._platform.find()]
            self._found = True
        for kind in Kind:
            for _ in range(self._plan.bounds(kind).low - len(self.of(kind))):
                await self._add(kind)
        unplaced = await self._platform.unplaced()
        for member in self.members:
            member.unplaced = unplaced.get(member.unit.name, "")
        await asyncio.gather(*(member.look() for member in self.members))
        for member in self.members:
            self._start_idle(member)
        await self._bring_in_line()
        for member in [one for one in self.members if one.leaving is not None and not one.busy]:
            self._remove_unused(member)
        await self._scale()

    async def stop(self) -> None:
        """End all units: the gateways first, so that no request loses its service."""
        gateways = self.of(Kind.GATEWAY)
        for group in (gateways, [one for one in self.members if one not in gateways]):
            for member in group:
                if member.work is not None:
                    member.work.cancel()
            await asyncio.gather(*(self._remove(member) for member in group))

    def describe(self) -> dict[str, Any]:
        """The pool as `outrider ray status` shows it."""
        sessions = self._sessions()
        gateways = [one for member in self.of(Kind.GATEWAY) for one in member.statuses if one is not None]
        targets = [one for view in self._views for one in view.workers if one["service"] == Kind.TARGET]
        return {
            "name": self._plan.name,
            "serves": any(one.state == "ready" for one in gateways) and any(one["is_healthy"] for one in targets),
            "replicas": {str(kind): str(self._plan.bounds(kind)) for kind in _SCALED},
            "load": {str(kind): dataclasses.asdict(load) for kind, load in self._loads.items()},
            "units": [one for member in self.members for one in member.described(sessions)],
        }

    # --- units ---

    async def _add(self, kind: Kind) -> None:
        number = max((one.unit.number for one in self.members if one.unit.kind is kind), default=-1) + 1
        self.members.append(Member(await self._platform.create(self._plan.units[kind], number)))
        log.info("%s-%d is requested from Ray", kind, number)

    def _leave(self, kind: Kind) -> None:
        """Let the unit leave that is missed least: one that is not ready, else the one with the fewest sessions."""
        sessions = self._sessions()
        chosen = min(
            self.of(kind), key=lambda one: (one.state == "ready", sessions.get(one.address, 0), -one.unit.number)
        )
        chosen.leaving = self._clock()
        log.info("%s leaves, with %d sessions", chosen.unit.name, sessions.get(chosen.address, 0))

    def _remove_unused(self, member: Member) -> None:
        """Remove a unit that leaves once no gateway uses it, or when its time is over."""
        late = self._clock() - (member.leaving or 0.0) >= LEAVE_SECONDS
        all_answer = len(self._views) == len(self._gateway_hosts())
        unused = all_answer and not any(view.lists(member.address) for view in self._views)
        if not member.address or unused or late:
            member.work = asyncio.create_task(self._remove(member, now=late), name=f"remove {member.unit.name}")

    async def _remove(self, member: Member, *, now: bool = False) -> None:
        if now:
            await asyncio.gather(*(remove_now(host, member.address) for host in self._gateway_hosts()))
        await member.stop()
        await self._platform.remove(member.unit)
        self.members.remove(member)
        log.info("%s has ended", member.unit.name)

    # --- processes ---

    def _start_idle(self, member: Member) -> None:
        """Start the processes of actors that have none, and again those that failed a while ago."""
        states = [one.state for one in member.statuses if one is not None]
        if member.busy or member.leaving is not None or not states or len(states) < len(member.unit.hosts):
            return
        if "failed" in states:
            now = self._clock()
            if member.failed is None:
                member.failed = now
                log.error("%s does not start: %s", member.unit.name, member.reason)
            if now - member.failed < _RETRY_SECONDS:
                return
        elif "idle" not in states:
            return
        member.failed = None
        # Ranks meet at an address of rank 0, which a new actor of it changes: they all start again.
        together = self._plan.units[member.unit.kind].ranks_span_machines
        indices = [i for i, state in enumerate(states) if together or state in ("idle", "failed")]
        member.work = asyncio.create_task(self._start(member, indices), name=f"start {member.unit.name}")

    async def _start(self, member: Member, indices: Sequence[int]) -> None:
        plan, hosts = self._plan.units[member.unit.kind], member.unit.hosts
        try:
            meeting = await hosts[0].call("reserve") if plan.ranks_span_machines else None
            starts = []
            for index in indices:
                config = plan.config
                if isinstance(config, TargetConfig) and meeting is not None:
                    config = dataclasses.replace(config, node_rank=index, dist_init_addr=meeting)
                launch = Launch(plan.kind, config, plan.bundles[index], plan.environment)
                starts.append(hosts[index].call("start", launch, seconds=STOP_SECONDS))
            await asyncio.gather(*starts)
        except (HostLost, OutriderError, OSError) as error:
            log.warning("%s cannot be started: %s", member.unit.name, error)

    # --- gateways ---

    def wanted(self) -> dict[str, str]:
        """The services that the gateways should use, by address. A lost one stays until its successor has an
        address, because the gateways know better than Ray whether it still answers.
        """
        staying = [one for kind in _SCALED for one in self.of(kind)]
        return {one.address: str(one.unit.kind) for one in staying if one.address and one.state != "failed"}

    def _gateway_hosts(self) -> list[HostHandle]:
        """The actors of gateways whose process runs."""
        return [host for member in self.of(Kind.GATEWAY) for host in member.running]

    async def _bring_in_line(self) -> None:
        """Update the pools of all gateways."""
        wanted = self.wanted()
        views = await asyncio.gather(*(bring_in_line(host, wanted) for host in self._gateway_hosts()))
        self._views = [view for view in views if view is not None]

    # --- load ---

    def _sessions(self) -> dict[str, int]:
        """Sessions by address, in all gateways."""
        counts: dict[str, int] = {}
        for view in self._views:
            for one in view.workers:
                counts[one["address"]] = counts.get(one["address"], 0) + one["sessions"]
        return counts

    async def _scale(self) -> None:
        """Change the number of units by the load."""
        if not self._views or len(self._views) < len(self._gateway_hosts()):
            return
        now, wanted = self._clock(), self.wanted()
        listings = [[one for one in view.workers if one["address"] in wanted] for view in self._views]
        lately = self._window.add(now, counters_of([view.metrics for view in self._views]))
        targets = pool_load("target", listings)
        self._loads = {Kind.TARGET: targets, Kind.DRAFT: draft_load(pool_load("draft", listings), targets, lately)}
        for kind, load in self._loads.items():
            before = len(self.of(kind))
            after, self._trends[kind] = decide(self._plan.rules[kind], before, load, self._trends[kind], now)
            if after != before:
                log.info("%ss: %d in place of %d, because of %s", kind, after, before, load)
            for _ in range(after - before):
                await self._add(kind)
            for _ in range(before - after):
                self._leave(kind)
