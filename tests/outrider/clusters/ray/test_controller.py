"""The controller, on a stand-in for Ray whose actors run stand-ins for services and gateways."""

import itertools
import json
from dataclasses import dataclass, field

import pytest

from outrider.clusters.ray.controller import LEAVE_SECONDS, Controller
from outrider.clusters.ray.plan import Kind, plan_pool
from outrider.clusters.ray.report import addresses, changes, state_table
from outrider.clusters.ray.units import HostLost, HostStatus, Unit
from outrider.config import read_flags
from outrider.config.ray import RayUpConfig

PORTS = itertools.count(1000)


@dataclass(eq=False)
class Actor:
    """An actor of Ray and the process in it; of a gateway, its /workers routes as well."""

    kind: Kind
    launch: object = None
    address: str = ""
    lost: bool = False
    failure: str = ""
    pool: dict = field(default_factory=dict)  # of a gateway: state by address
    sessions: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)

    def restart(self):
        """Ray has started the actor again."""
        self.launch, self.address, self.lost, self.pool = None, "", False, {}

    async def call(self, method, *arguments, seconds=0.0):
        if self.lost:
            raise HostLost("its node is gone")
        return getattr(self, method)(*arguments)

    def reserve(self):
        return f"10.0.0.1:{next(PORTS)}"

    def start(self, launch):
        self.calls.append("start")
        self.launch, self.address = launch, f"10.0.0.1:{next(PORTS)}"
        if getattr(launch.config, "node_rank", 0):
            self.address = ""

    def stop(self):
        self.calls.append("stop")
        self.launch = None

    def status(self):
        if self.launch is None:
            return HostStatus("idle", "10.0.0.1")
        return HostStatus("failed" if self.failure else "ready", "10.0.0.1", self.address, self.failure)

    def ask(self, method, route, body=None):
        self.calls.append((method, route))
        if (method, route) == ("GET", "/metrics"):
            return 200, ""
        if method == "GET":
            return 200, json.dumps({"workers": [self.worker(*one) for one in self.pool.items()]})
        if method == "POST":
            self.pool[body["url"]] = [body["worker_type"], "ready"]
        else:
            address, _, query = route.removeprefix("/workers/").partition("?")
            if query or not self.sessions.get(address):
                self.pool.pop(address, None)
            else:
                self.pool[address][1] = "draining"
        return 202, ""

    def worker(self, address, known):
        service, state = known
        sessions = self.sessions.get(address, 0)
        return {
            "address": address, "service": service, "is_healthy": state == "ready", "state": state,
            "sessions": sessions, "max_sessions": 4,
            "waiting_sessions": max(0, sessions - 4), "sources": [] if state == "draining" else ["api"],
        }  # fmt: skip


class StandIn:
    """Ray: places everything at once, unless it is full."""

    def __init__(self):
        self.units, self.full = {}, False
        self.pending = {}

    async def find(self):
        return list(self.units.values())

    async def create(self, plan, number):
        unit = Unit(plan.kind, number, [Actor(plan.kind) for _ in plan.bundles])
        self.units[unit.name] = unit
        if self.full:
            self.pending[unit.name] = "no room on the cluster for 1 CPU"
            for actor in unit.hosts:
                actor.lost = True
        return unit

    async def unplaced(self):
        return dict(self.pending)

    async def remove(self, unit):
        del self.units[unit.name]

    def actor(self, name, index=0):
        return self.units[name].hosts[index]


class Pool:
    """A controller with a clock of its own, and a step a second."""

    def __init__(self, *flags):
        replicas = ["--target-replicas", "1:3", "--draft-replicas", "1", "--speculative-algorithm", "NGRAM"]
        scaling = ["--scale-up-seconds", "2", "--scale-down-seconds", "5", "--scale-down-load", "0.7"]
        config, _ = read_flags(RayUpConfig, [*replicas, *scaling, *flags], "outrider ray up")
        self.plan, self.ray, self.now = plan_pool(config, {"CPU": 8.0}), StandIn(), 0.0
        self.begin()

    def begin(self):
        """Ray has started the controller, perhaps again."""
        self.controller = Controller(self.plan, self.ray, lambda: self.now)

    async def steps(self, count):
        for _ in range(count):
            self.now += 1
            await self.controller.step()
            for member in list(self.controller.members):
                if member.work is not None:
                    await member.work

    @property
    def gateway(self):
        return self.ray.actor("gateway-0")

    def names(self, kind="target"):
        return sorted(name for name in self.ray.units if name.startswith(kind))

    def states(self):
        return {one["unit"]: one["state"] for one in self.controller.describe()["units"]}


@pytest.fixture
async def pool():
    made = Pool()
    await made.steps(4)
    return made


async def test_a_pool_starts_and_gateways_learn_of_it(pool):
    assert pool.states() == {"gateway-0": "ready", "target-0": "ready", "draft-0": "ready"}
    services = {pool.ray.actor(name).address: [name[:-2], "ready"] for name in ("target-0", "draft-0")}
    assert pool.gateway.pool == services
    described = pool.controller.describe()
    assert described["serves"]
    assert addresses(described) == f"the pool outrider serves at {pool.gateway.address}/v1"
    table = state_table(described)
    assert "targets: 1 of 1:3, 0 sessions for 4, 0 waiting" in table
    assert f"target-0   ready  10.0.0.1  {pool.ray.actor('target-0').address}" in table
    seen = {}
    assert len(list(changes(seen, described))) == 3
    assert list(changes(seen, described)) == []


async def test_nothing_changes_in_a_pool_that_is_as_it_should_be(pool):
    for name in pool.ray.units:
        pool.ray.actor(name).calls.clear()
    await pool.steps(3)
    assert pool.gateway.calls == [("GET", "/workers"), ("GET", "/metrics")] * 3
    assert pool.ray.actor("target-0").calls == []


async def test_an_actor_that_ray_started_again_gets_a_process_and_its_new_address_replaces_the_old_one(pool):
    target, before = pool.ray.actor("target-0"), pool.ray.actor("target-0").address
    target.lost = True
    await pool.steps(3)
    assert pool.states()["target-0"] == "lost"
    assert before in pool.gateway.pool  # the gateway knows better whether it still answers
    pool.gateway.calls.clear()
    target.restart()
    await pool.steps(3)
    assert target.address in pool.gateway.pool
    assert before not in pool.gateway.pool
    changed = [call for call in pool.gateway.calls if call[0] != "GET"]
    assert changed == [("POST", "/workers"), ("DELETE", f"/workers/{before}")]  # sessions find room at once


async def test_a_gateway_that_was_lost_learns_of_all_services_again(pool):
    before = dict(pool.gateway.pool)
    pool.gateway.restart()
    await pool.steps(3)
    assert pool.gateway.pool == before


async def test_a_controller_that_was_lost_goes_on_where_it_was(pool):
    before = dict(pool.gateway.pool)
    for name in pool.ray.units:
        pool.ray.actor(name).calls.clear()
    pool.begin()
    await pool.steps(3)
    assert pool.gateway.pool == before
    assert set(pool.gateway.calls) == {("GET", "/workers"), ("GET", "/metrics")}
    assert pool.ray.actor("target-0").calls == []


async def test_targets_are_added_and_drained_by_load(pool):
    first = pool.ray.actor("target-0").address
    pool.gateway.sessions[first] = 6
    await pool.steps(7)
    assert pool.names() == ["target-0", "target-1"]
    second = pool.ray.actor("target-1").address
    pool.gateway.sessions = {first: 1, second: 1}
    await pool.steps(8)
    assert pool.states()["target-1"] == "leaving"  # of the same load, the newer one
    assert pool.gateway.pool[second] == ["target", "draining"]
    await pool.steps(3)
    assert pool.names() == ["target-0", "target-1"]  # as long as a session is left
    pool.gateway.sessions[second] = 0
    del pool.gateway.pool[second]
    pool.gateway.lost = True  # it may be too busy to answer, and have sessions there
    await pool.steps(3)
    assert pool.names() == ["target-0", "target-1"]
    pool.gateway.lost = False
    await pool.steps(2)
    assert pool.names() == ["target-0"]
    pool.gateway.sessions[first] = 6
    await pool.steps(4)
    assert pool.names() == ["target-0", "target-2"]  # Ray may not have ended all of the former one yet
    pool.gateway.sessions = {}
    await pool.steps(9)
    assert pool.names() == ["target-0"]
    assert pool.gateway.pool.keys() == {first, pool.ray.actor("draft-0").address}


async def test_sessions_that_never_leave_are_moved_by_force(pool):
    pool.gateway.sessions[pool.ray.actor("target-0").address] = 6
    await pool.steps(7)
    second = pool.ray.actor("target-1").address
    pool.gateway.sessions = {second: 1, pool.ray.actor("target-0").address: 1}
    await pool.steps(8)
    pool.now += LEAVE_SECONDS
    await pool.steps(2)
    assert ("DELETE", f"/workers/{second}?drain=false") in pool.gateway.calls
    assert pool.names() == ["target-0"]


async def test_a_full_cluster_is_reported(pool):
    pool.ray.full = True
    pool.gateway.sessions[pool.ray.actor("target-0").address] = 6
    await pool.steps(20)
    assert pool.names() == ["target-0", "target-1"]  # no third one while the second has no place
    assert pool.states()["target-1"] == "pending"
    assert "no room on the cluster for 1 CPU" in state_table(pool.controller.describe())


async def test_a_process_that_its_flags_end_is_started_again_after_a_minute(pool):
    target = pool.ray.actor("target-0")
    target.failure = "no such model"
    target.calls.clear()
    await pool.steps(2)
    assert target.address not in pool.gateway.pool
    await pool.steps(50)
    assert target.calls == []
    target.failure = ""
    await pool.steps(1)
    target.failure = "no such model"
    await pool.steps(61)
    assert target.calls == ["start"]


async def test_a_gateway_starts_while_the_machine_of_another_one_is_lost():
    pool = Pool("--gateways", "2")
    await pool.steps(4)
    first, second = pool.ray.units["gateway-0"].hosts
    second.lost = True
    first.restart()
    await pool.steps(3)
    assert first.pool.keys() == {pool.ray.actor(name).address for name in ("target-0", "draft-0")}
    second.restart()
    second.lost, first.failure = False, "its port is taken"
    await pool.steps(3)
    assert second.pool.keys() == first.pool.keys()


async def test_ranks_on_several_machines_start_and_start_again_together():
    pool = Pool("--tp-size", "2", "--nnodes", "2")
    await pool.steps(4)
    hosts = pool.ray.units["target-0"].hosts
    before = [host.launch.config for host in hosts]
    assert [config.node_rank for config in before] == [0, 1]
    assert before[0].dist_init_addr == before[1].dist_init_addr
    assert pool.controller.wanted().keys() == {hosts[0].address, pool.ray.actor("draft-0").address}
    hosts[1].lost = True
    await pool.steps(2)
    assert pool.states()["target-0"] == "lost"
    hosts[1].restart()
    await pool.steps(3)
    after = [host.launch.config for host in hosts]
    assert [host.calls.count("start") for host in hosts] == [2, 2]
    assert after[0].dist_init_addr == after[1].dist_init_addr != before[0].dist_init_addr


async def test_a_pool_without_a_target_in_use_does_not_serve(pool):
    pool.gateway.pool[pool.ray.actor("target-0").address][1] = "unreachable"
    await pool.steps(1)
    assert not pool.controller.describe()["serves"]
    assert state_table(pool.controller.describe()).startswith("the pool outrider does not serve\n")


async def test_a_pool_ends_gateways_first(pool):
    order = []
    remove = pool.ray.remove

    async def noted(unit):
        order.append(unit.name)
        await remove(unit)

    pool.ray.remove = noted
    await pool.controller.stop()
    assert order[0] == "gateway-0"
    assert pool.ray.units == {}
    assert pool.controller.members == []
