"""A pause holds for targets that restart meanwhile."""

from types import SimpleNamespace

import pytest

from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.control.worker_answers import answers_for
from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from gateway.workers.peers import Peers
from outrider.config import GatewayConfig
from outrider.errors import InvalidRequest, Unavailable
from outrider.wire.v1 import common_pb2, target_pb2, target_pb2_grpc
from tests.support.gateway.services import until
from tests.support.gateway.streaming import Stream, started, system


def control(gateway, what, status=200, **body):
    answer = gateway.client.post(f"/{what}_generation", json=body, headers=gateway.admin)
    assert answer.status_code == status, answer.text


def back(gateway, target):
    target.start()
    until(lambda: gateway.client.get("/health").status_code == 200)


def gone(gateway, target):
    target.stop()
    until(lambda: gateway.client.get("/health").status_code == 503)


def test_a_target_that_restarts_in_a_pause_is_paused(folder):
    with system(folder, drafts=0) as (gateway, [target], _):
        stream = Stream(gateway)
        started(stream)
        control(gateway, "pause", mode="in_place")
        gone(gateway, target)
        back(gateway, target)
        until(lambda: target.sessions)
        assert target.engine.held, "before the session came"
        control(gateway, "continue")
        assert stream.whole()
        gone(gateway, target)
        back(gateway, target)
        assert gateway.text("A", max_tokens=3) == "BCD"


def test_a_target_that_was_away_is_paused_and_resumed(folder):
    with system(folder, drafts=0) as (gateway, [target], _):
        gone(gateway, target)
        control(gateway, "pause", 503)
        back(gateway, target)
        assert target.engine.held
        gone(gateway, target)
        control(gateway, "continue", 503)
        back(gateway, target)
        assert gateway.text("A", max_tokens=3) == "BCD"


@pytest.fixture
def sent(monkeypatch):
    """Calls to a target before it is used again. With a link as its channel, it is resumed after the first call."""

    calls = []

    class Stub:
        def __init__(self, link):
            self.link = link

        async def PauseGeneration(self, request, **options):
            assert request.mode == common_pb2.PAUSE_MODE_IN_PLACE, "no session ends"
            calls.append("pause")
            if len(calls) == 1 and self.link is not None:
                self.link.paused = False

        async def ContinueGeneration(self, request, **options):
            calls.append("continue")

    monkeypatch.setattr(target_pb2_grpc, "TargetServiceStub", Stub)
    return calls


async def test_a_resume_during_the_handshake_is_sent(sent):
    link = TargetLink("unix:/nowhere")
    await link.prepare(link)
    assert sent == []
    link.paused = True
    await link.prepare(link)
    assert sent == ["pause", "continue"]


async def test_a_target_s_reported_pause_is_kept(sent):
    link = TargetLink("unix:/nowhere")
    Orchestrator([link], [], Metrics())
    for paused, expected in ((True, ["pause"]), (False, [])):
        sent.clear()
        await link.stream.on_frame(target_pb2.VerifyResponse(load=common_pb2.EngineLoad(paused=paused)))
        await link.prepare(None)
        assert sent == expected


async def test_a_report_from_before_a_pause_does_not_end_it():
    link = TargetLink("unix:/nowhere")
    link.set_paused(True)
    for reported, paused in ((False, True), (True, True), (False, None)):
        link.update_load(common_pb2.EngineLoad(paused=reported))
        assert link.paused is paused


async def test_a_pause_reaches_other_workers(tmp_path):
    links = [TargetLink(f"unix:{tmp_path}/nowhere") for _ in range(2)]
    places = [Peers(index, 2, tmp_path) for index in range(2)]
    controls = [
        Control(Orchestrator([link], [], Metrics()), Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse(), place))
        for link, place in zip(links, places, strict=True)
    ]
    await places[1].serve(answers_for(SimpleNamespace(abort=list), controls[1]))
    for act, expected in ((lambda: controls[0].pause("retract"), True), (controls[0].resume, False)):
        with pytest.raises(Unavailable):
            await act()
        assert [link.paused for link in links] == [expected] * 2
    await places[1].stop()


async def test_an_open_update_reaches_other_workers(tmp_path):
    """The worker that ends it need not be the one that began it; a pause of a client's outlives it."""
    places = [Peers(index, 2, tmp_path) for index in range(2)]
    one, other = controls = [
        Control(Orchestrator([], [], Metrics()), Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse(), place))
        for place in places
    ]
    for place, own in zip(places, controls, strict=True):
        await place.serve(answers_for(SimpleNamespace(abort=list), own))
    for between, paused in ((None, False), (other.resume, False), (lambda: other.pause("retract"), True)):
        await one.begin_update()
        assert all(control.update_open for control in controls)
        with pytest.raises(InvalidRequest, match="open already"):
            await other.begin_update()
        if between is not None:
            await between()
        await other.end_update()
        late = [TargetLink(f"unix:{tmp_path}/nowhere") for _ in controls]
        for control, link in zip(controls, late, strict=True):
            control.prepare(link)
            assert bool(link.paused) is paused
        with pytest.raises(InvalidRequest, match="no update of the weights is open"):
            await one.end_update()
    for place in places:
        await place.stop()


async def test_an_update_is_not_open_where_a_target_cannot_be_paused(tmp_path):
    link = TargetLink(f"unix:{tmp_path}/nowhere")
    facts = Facts(GatewayConfig(), target_pb2.GetTargetInfoResponse())
    control = Control(Orchestrator([link], [], Metrics()), facts)
    with pytest.raises(Unavailable):
        await control.begin_update()
    assert not control.update_open
    assert link.paused is False
