"""Units as Ray has them: a named placement group, and a named detached actor in each of its bundles.

Names carry everything that a controller must know to find them again: POOL/KIND-NUMBER, and /INDEX for an actor.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.clusters.ray.host import Host
from outrider.clusters.ray.plan import Bundle, Kind, UnitPlan
from outrider.clusters.ray.units import CALL_SECONDS, HostLost, Unit
from outrider.errors import OutriderError

NAMESPACE = "outrider"  # of actors and placement groups
CONTROLLER = "controller"


class ActorHandle:
    """An actor of Ray."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """As of HostHandle."""
        try:
            return await asyncio.wait_for(getattr(self._actor, method).remote(*arguments), seconds)
        except RayTaskError as error:  # the method's own exception
            cause = error.cause
            raise cause if isinstance(cause, (OutriderError, OSError)) else HostLost(f"{method}: {cause!r}") from None
        except TimeoutError:
            raise HostLost("its actor does not answer") from None
        except (RayActorError, GetTimeoutError) as error:
            raise HostLost(f"Ray starts its actor again ({type(error).__name__})") from None
        except RayError as error:
            raise HostLost(f"its actor cannot be reached ({type(error).__name__})") from None

    def kill(self) -> None:
        """End the actor for good, if it has not ended."""
        with contextlib.suppress(ValueError, RayError):
            ray.kill(self._actor, no_restart=True)


class RayPlatform:
    """The units of one pool."""

    def __init__(self, pool: str, plans: Mapping[Kind, UnitPlan]) -> None:
        self._pool, self._plans = pool, plans

    async def find(self) -> list[Unit]:
        """As of Platform."""
        found = []
        for name in await asyncio.to_thread(groups_of, self._pool):
            kind, _, number = name.partition("/")[2].rpartition("-")
            found.append(await self.create(self._plans[Kind(kind)], int(number)))
        return found

    async def create(self, plan: UnitPlan, number: int) -> Unit:
        """As of Platform. What exists of the unit is taken as it is."""
        name = f"{self._pool}/{plan.kind}-{number}"
        hosts = await asyncio.to_thread(_create, name, plan)
        return Unit(plan.kind, number, [ActorHandle(host) for host in hosts])

    async def unplaced(self) -> Mapping[str, str]:
        """As of Platform."""
        found = {}
        for name, table in (await asyncio.to_thread(groups_of, self._pool)).items():
            if table["state"] != "CREATED":
                wanted = ", ".join(_words(bundle) for bundle in table["bundles"].values())
                scheduling = table.get("stats", {}).get("scheduling_state", "").lower().replace("_", " ")
                found[name.partition("/")[2]] = f"no room on the cluster for {wanted} ({scheduling})"
        return found

    async def remove(self, unit: Unit) -> None:
        """As of Platform."""
        for host in unit.hosts:
            assert isinstance(host, ActorHandle)
            await asyncio.to_thread(host.kill)
        await asyncio.to_thread(_remove_group, f"{self._pool}/{unit.name}")


def groups_of(pool: str) -> dict[str, Mapping[str, Any]]:
    """Ray's tables of a pool's placement groups that are not removed, by name."""
    tables = placement_group_table().values()
    return {
        table["name"]: table for table in tables if table["name"].startswith(f"{pool}/") and table["state"] != "REMOVED"
    }


def actors_of(pool: str) -> list[str]:
    """The names of a pool's actors."""
    return [name for name in list_named_actors() if name.startswith(f"{pool}/")]


def remove_all(pool: str) -> int:
    """End what is left of a pool, its controller first. Returns the number of actors."""
    names = sorted(actors_of(pool), key=lambda name: name != f"{pool}/{CONTROLLER}")
    for name in names:
        with contextlib.suppress(ValueError, RayError):  # it has ended since
            ActorHandle(ray.get_actor(name)).kill()
    for name in groups_of(pool):
        _remove_group(name)
    return len(names)


def _create(name: str, plan: UnitPlan) -> list[Any]:
    group = _group(name)
    if group is None:
        bundles = [bundle.resources for bundle in plan.bundles]
        group = placement_group(bundles, strategy=plan.strategy, name=name, lifetime="detached")
    return [_actor(f"{name}/{index}", group, index, bundle) for index, bundle in enumerate(plan.bundles)]


def _actor(name: str, group: PlacementGroup, index: int, bundle: Bundle) -> Any:
    """The actor of a bundle. Ray starts it again, in this bundle, for as long as it is not killed."""
    place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
    resources = {"TPU": float(bundle.tpus)} if bundle.tpus else None
    return ray.remote(Host).options(
        name=name, get_if_exists=True, lifetime="detached", max_restarts=-1, num_cpus=bundle.cpus,
        num_gpus=bundle.gpus, resources=resources, scheduling_strategy=place,
    ).remote()  # fmt: skip


def _group(name: str) -> PlacementGroup | None:
    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _remove_group(name: str) -> None:
    if (group := _group(name)) is not None:
        remove_placement_group(group)


def _words(bundle: Mapping[str, float]) -> str:
    return " + ".join(f"{count:g} {resource}" for resource, count in bundle.items())
