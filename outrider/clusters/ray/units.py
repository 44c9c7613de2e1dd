"""Units, the processes in them, and what places them: the words between the controller and Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from outrider.clusters.ray.plan import Bundle, Kind, UnitPlan
from outrider.config import DraftConfig, GatewayConfig, TargetConfig

CALL_SECONDS = 5.0  # for an actor's answer


@dataclass(frozen=True)
class Launch:
    """A process to start. environment: its secrets."""

    kind: Kind
    config: TargetConfig | DraftConfig | GatewayConfig
    bundle: Bundle
    environment: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True)
class HostStatus:
    """What an actor reports of its process.

    state: idle (not started), starting, ready, or failed, for a process that its flags or files end. node: address of
    the machine. address: of the service; empty for ranks that serve nothing. reason: why it ended last. restarts: of
    the process since it was started
    """

    state: str
    node: str
    address: str = ""
    reason: str = ""
    restarts: int = 0


class HostLost(Exception):
    """An actor does not answer: Ray is starting it, or its node is lost."""


class HostHandle(Protocol):
    """An actor that runs a process."""

    async def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of Host. Raises HostLost, and OutriderError and OSError of the method."""


@dataclass
class Unit:
    """A unit on the cluster. hosts: an actor for each bundle."""

    kind: Kind
    number: int
    hosts: Sequence[HostHandle]

    @property
    def name(self) -> str:
        """Its name in the pool."""
        return f"{self.kind}-{self.number}"


class Platform(Protocol):
    """What places units. Ray; in tests also a stand-in."""

    async def find(self) -> list[Unit]:
        """The units of the pool that exist."""

    async def create(self, plan: UnitPlan, number: int) -> Unit:
        """Ask for a unit. It may be placed much later."""

    async def unplaced(self) -> Mapping[str, str]:
        """Why units are not placed, or not wholly, by name."""

    async def remove(self, unit: Unit) -> None:
        """End a unit's actors and give its resources back."""
