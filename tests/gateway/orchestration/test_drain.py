"""Replicas that leave and join while sessions run, with links without services."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.orchestration import target_absence
from gateway.orchestration.orchestrator import Orchestrator
from gateway.pools.addresses import parse
from gateway.pools.discovery import Discovery
from gateway.pools.members import Decision, Members, Service
from gateway.process.links import Links
from gateway.streams.availability import Availability, ReplicaState
from gateway.streams.connection import PLAIN, Connection
from gateway.streams.draft import DraftLink
from gateway.streams.features import Features
from gateway.streams.link import Link
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.config import GatewayConfig
from outrider.errors import ConfigError, Unavailable
from outrider.speculation.proposal import Commit, FinishReason, path_hash
from outrider.tls import ClientTls
from outrider.wire.codec import commits_to_pb
from outrider.wire.opens import open_from_pb
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.support.gateway.requests import request_for

FULL = 8  # gRPC's code of a target without room


class Pools:
    """Targets and drafts that are up, as many as asked for, and their orchestrator."""

    def __init__(self, targets, drafts=0):
        self.targets = [TargetLink(f"unix:/target{i}") for i in range(targets)]
        self.drafts = [DraftLink(f"unix:/draft{i}", common_pb2.ModelInfo()) for i in range(drafts)]
        for link in (*self.targets, *self.drafts):
            link.up = True
        self.metrics = Metrics()
        self.orchestrator = Orchestrator(self.targets, self.drafts, self.metrics, resume_timeout=5)

    def open(self, prompt=(1, 2), count=20):
        return self.orchestrator.sessions.open(request_for(list(prompt), count))

    def drain(self, target):
        return asyncio.create_task(self.orchestrator.drain(target))


async def commit(target, session, tokens, base=None, finish=FinishReason.RUNNING):
    """A frame of a target with tokens behind those of the session, or behind `base` of them."""
    text = session.tokens[:base]
    root = path_hash(np.array([*text, *tokens], np.uint32))
    batch = commits_to_pb([Commit(session.id, len(text), np.array(tokens, np.uint32), root, finish_reason=finish)])
    await target.stream.on_frame(target_pb2.VerifyResponse(commits=batch))


async def refuse(target, session):
    error = common_pb2.SessionError(session_id=session.id, code=FULL, message="no room")
    await target.stream.on_frame(target_pb2.VerifyResponse(errors=[error]))


def sent(link):
    """What a link's next frame holds: tokens of the sessions that it opens, and ids of those that it closes."""
    frame = link.take_frame()
    opens = [open_from_pb(request).tokens.tolist() for request in frame.opens]
    return opens, np.frombuffer(frame.closes, "<u8").tolist()


async def test_sessions_of_a_target_that_drains_go_on_elsewhere():
    pools = Pools(2)
    leaves, stays = pools.targets
    session = pools.open()
    assert session.target is leaves
    sent(leaves)
    await commit(leaves, session, [3, 4])
    drain = pools.drain(leaves)
    await asyncio.sleep(0)
    assert sent(leaves) == ([], [session.id])
    assert sent(stays) == ([[1, 2, 3, 4]], [])
    await commit(leaves, session, [5, 6])  # was on its way
    assert session.tokens == [1, 2, 3, 4]
    await asyncio.sleep(0.1)
    assert not drain.done()  # the other target may refuse it yet
    await commit(stays, session, [5])
    assert session.tokens == [1, 2, 3, 4, 5]
    await asyncio.wait_for(drain, 60)
    assert pools.open().target is stays
    assert pools.open().target is stays
    assert leaves.availability.state is ReplicaState.DRAINING
    await pools.orchestrator.detach(leaves)
    assert pools.orchestrator.targets == [stays]
    assert "target0" not in pools.metrics.render().decode()
    assert session.failures.losses == 0


async def test_a_session_without_room_elsewhere_ends_where_it_is():
    pools = Pools(2)
    leaves, full = pools.targets
    session = pools.open()
    await commit(leaves, session, [3])
    drain = pools.drain(leaves)
    await asyncio.sleep(0)
    assert session.target is full
    sent(leaves)
    await refuse(full, session)
    assert session.target is leaves
    assert sent(leaves) == ([[1, 2, 3]], [])
    await commit(leaves, session, [4, 5], base=3)
    await commit(leaves, session, [4], base=3)  # of the other of its two runs there
    assert session.tokens == [1, 2, 3, 4, 5]
    await asyncio.sleep(0.1)
    assert not drain.done()
    await commit(leaves, session, [6], finish=FinishReason.STOP)
    await asyncio.wait_for(drain, 60)


async def test_the_last_target_drains_until_its_sessions_end_or_another_comes():
    pools = Pools(2)
    last, comes = pools.targets
    comes.up = False
    session = pools.open()
    drain = pools.drain(last)
    await asyncio.sleep(0)
    await pools.orchestrator.detach(comes)
    assert session.target is last
    with pytest.raises(Unavailable, match="its pool is empty") as caught:
        pools.open()
    assert caught.value.retry_after == 1
    await commit(last, session, [3])
    late = TargetLink("unix:/late")
    pools.orchestrator.attach(late)
    late.up = True
    late.events.up()
    assert session.target is late
    assert sent(late) == ([[1, 2, 3]], [])
    await commit(late, session, [4])
    await asyncio.wait_for(drain, 60)
    assert pools.open().target is late


async def test_sessions_of_a_target_that_stops_go_on_elsewhere_and_come_back_if_it_does():
    """A target reports that it does not serve because it stops, or because its engine hangs."""
    pools = Pools(2)
    stops, stays = pools.targets
    session = pools.open()
    await commit(stops, session, [3])
    sent(stops)
    stops.stopping = True
    stops.events.stopping()
    assert session.target is stays
    assert sent(stops) == ([], [session.id])
    await commit(stays, session, [4])
    assert (stops.availability.state, pools.open().target) == (ReplicaState.DRAINING, stays)
    assert session.failures.losses == 0
    stays.stopping = True
    stays.events.stopping()
    assert session.target is stays  # no other target serves
    late = pools.open()  # the pool is not empty, so requests wait
    assert late.target is None
    stops.stopping = False
    stops.events.stopping()
    assert session.target is late.target is stops


async def test_a_target_may_leave_at_once_and_its_sessions_wait():
    pools = Pools(1)
    (target,) = pools.targets
    session = pools.open()
    await commit(target, session, [3])
    await pools.orchestrator.detach(target)
    assert session.target is None
    assert not pools.orchestrator.targets
    with pytest.raises(Unavailable, match="its pool is empty"):
        pools.open()
    late = TargetLink("unix:/late")
    pools.orchestrator.attach(late)
    late.up = True
    late.events.up()
    assert sent(late) == ([[1, 2, 3]], [])
    await commit(late, session, [4])
    assert session.tokens == [1, 2, 3, 4]


async def test_a_pool_without_a_target_that_fits_answers_soon_and_with_the_reason(monkeypatch):
    monkeypatch.setattr(target_absence, "_REFUSED_GRACE", 0.01)
    pools = Pools(2)
    one, other = pools.targets
    session = pools.open()
    for target in pools.targets:
        target.up = False
        target.events.down()
    one.absence.set(Availability(ReplicaState.REFUSED, "it serves model b, not a"))
    for away in (ReplicaState.UNREACHABLE, ReplicaState.STARTING):
        other.absence.set(Availability(away, "not there"))
        for _ in range(2):
            one.events.absent()
            await asyncio.sleep(0.02)
        assert pools.open().target is None  # the other one may serve
    other.absence.set(Availability(ReplicaState.REFUSED, "it has another vocabulary"))
    with pytest.raises(Unavailable, match=r"no target that fits: it serves model b, not a \(of 2 targets") as caught:
        pools.open()
    assert caught.value.retry_after == 1
    one.events.absent()
    assert session.id in pools.orchestrator.sessions.by_id
    await asyncio.sleep(0.02)
    one.events.absent()
    assert not pools.orchestrator.sessions.by_id
    with pytest.raises(Unavailable, match="serves model b"):
        await session.inbox.next()
    other.absence.set(Availability(ReplicaState.STARTING, "restarted"))
    assert pools.open().target is None


async def test_a_target_that_is_kept_gets_sessions_again():
    pools = Pools(1)
    (target,) = pools.targets
    session = pools.open()
    drain = pools.drain(target)
    await asyncio.sleep(0)
    drain.cancel()
    pools.orchestrator.readmit(target)
    assert pools.open().target is session.target is target


async def test_an_empty_draft_pool_costs_speed_only():
    pools = Pools(1, drafts=2)
    first, second = pools.drafts
    session = pools.open()
    assert session.draft is first
    await commit(pools.targets[0], session, [3])
    for draft, other in ((first, second), (second, None)):
        sent(draft)
        await pools.orchestrator.detach(draft)
        assert session.draft is other
        if other is not None:
            assert sent(other)[0] == [[1, 2, 3]]
    assert not pools.orchestrator.drafts
    await commit(pools.targets[0], session, [4])
    assert pools.open().draft is None
    late = DraftLink("unix:/late", common_pb2.ModelInfo())
    pools.orchestrator.attach(late)
    late.up = True
    late.events.up()
    assert session.draft is late  # one draft for the sessions of all targets


async def test_a_late_target_sends_hidden_states_too():
    pools = Pools(1, drafts=1)
    pools.drafts[0].features = Features(common_pb2.FeatureSpec(spec_id=7), [])
    late = TargetLink("unix:/late")
    pools.orchestrator.attach(late)
    assert list(late.features.wanted) == [7]
    await pools.orchestrator.detach(pools.drafts[0])
    assert not late.features.wanted


def facts_of(fingerprint, version="0", first="f1"):
    model = common_pb2.ModelInfo(model_path="m", fingerprint=fingerprint)
    return target_pb2.GetTargetInfoResponse(model=model, first_fingerprint=first, weight_version=version)


@pytest.fixture
async def served(monkeypatch):
    """A gateway that serves one target, in this process: links, their members, the control of all."""
    monkeypatch.setattr(Link, "start", lambda _: None)
    names = [parse("unix:/nowhere/first")]
    members, orchestrator = Members(names), Orchestrator([], [], Metrics())
    links = Links(Discovery(members, 5.0), orchestrator, PLAIN)
    links.start()
    (first,) = orchestrator.targets
    first.up, first.info = True, facts_of("f1")
    links.expect(first)
    control = Control(orchestrator, Facts(GatewayConfig(), first.info))
    links.serve(control)
    decided = iter(range(1, 100))

    def decide(address, *, added, service=Service.TARGET, drain=True):
        members.decide(Decision(service, address, added, drain, (next(decided), 0)))
        return next((link for link in orchestrator.links if link.address == address), None)

    yield SimpleNamespace(
        first=first, members=members, orchestrator=orchestrator, links=links, control=control, decide=decide
    )
    await links.stop()
    await orchestrator.stop()


async def test_a_late_target_must_have_the_weights_of_the_last_update(served):
    served.control.weights.adopt(
        {"fingerprint": "f2", "version": "2", "folder": "", "shared": "", "here": [served.first.address]}
    )
    late = served.decide("unix:/nowhere/late", added=True)
    assert late.expects("f2")
    late.absence.set(late.availability)
    with pytest.raises(ConfigError, match='awaits the weights "2"'):
        late._pool.check(late.address, facts_of("f1"))
    with pytest.raises(ConfigError, match="fingerprint other; the model that this gateway serves is m"):
        late._pool.check(
            late.address, target_pb2.GetTargetInfoResponse(model=common_pb2.ModelInfo(fingerprint="other"))
        )
    served.control.weights.adopt(
        {"fingerprint": "f3", "version": "3", "folder": "/w", "shared": "", "here": [late.address]}
    )
    assert late.expects("f3")
    assert late._pool.request_for(facts_of("f1")).folder == "/w"


async def test_pauses_and_flushes_reach_late_replicas(served, monkeypatch):
    assert served.decide("unix:/nowhere/a", added=True).paused is None
    served.control.adopt_pause(True)
    assert served.decide("unix:/nowhere/b", added=True).paused is True
    served.control.adopt_pause(False)
    assert not served.decide("unix:/nowhere/c", added=True).paused
    await served.control.weights.flush_target_states()
    assert served.decide("unix:/nowhere/d", added=True, service=Service.DRAFT)._due_flush is None
    with pytest.raises(Unavailable, match="/nowhere/"):  # those that are there cannot be reached
        await served.control.flush_cache()
    assert served.decide("unix:/nowhere/e", added=True, service=Service.DRAFT)._due_flush is not None
    late, flushed = served.decide("unix:/nowhere/f", added=True), []

    class Stub:
        def __init__(self, channel):
            pass

        async def FlushCache(self, request, **options):
            flushed.append(request)

    monkeypatch.setattr(target_pb2_grpc, "TargetServiceStub", Stub)
    await late.prepare(None)
    await late.prepare(None)
    assert len(flushed) == 1


@pytest.mark.parametrize(("flag", "expected"), [(None, "targets.svc"), ("all", "all")])
async def test_replicas_that_dns_finds_show_certificates_of_the_name(flag, expected):
    name = parse("dns:targets.svc:1")
    members, orchestrator = Members([name, parse("b:1")]), Orchestrator([], [], Metrics())
    links = Links(Discovery(members, 5.0), orchestrator, Connection(ClientTls("ca.pem", b"", None, flag)))
    members.set_addresses(Service.TARGET, name, ["10.0.0.1:1"])
    made = {member.address: links._link_to(member) for member in members}
    assert made["10.0.0.1:1"]._connection.tls.server_name == expected
    assert made["b:1"]._connection.tls.server_name == flag


async def test_a_replica_that_is_added_while_it_drains_stays(served):
    session = served.orchestrator.sessions.open(request_for([1], 5))
    link = served.decide(served.first.address, added=False)
    await asyncio.sleep(0.01)
    assert (link, link.draining, session.target) == (served.first, True, served.first)
    assert served.decide(served.first.address, added=True) is served.first
    await asyncio.sleep(0.1)
    assert not served.first.draining
    assert served.orchestrator.targets == [served.first]
    served.decide(served.first.address, added=False)
    await asyncio.sleep(0.01)
    served.orchestrator.sessions.close(session)
    async with asyncio.timeout(60):
        while served.orchestrator.targets:
            await asyncio.sleep(0.01)
    served.decide("unix:/nowhere/x", added=True)
    served.decide("unix:/nowhere/x", added=False, drain=False)
    await asyncio.sleep(0.01)
    assert not served.orchestrator.targets
