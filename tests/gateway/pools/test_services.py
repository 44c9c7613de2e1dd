"""Routing of sessions, with services that come and go."""

from tests.support.gateway.engines import common
from tests.support.gateway.services import Draft, Gateway, Service, Target, until
from tests.support.gateway.streaming import Stream, started, system

PAGE = 16


def test_conversations_stay_on_their_target_and_survive_its_loss(folder):
    """Second turns run where the first ones are cached, and continue elsewhere when that target dies.

    Steps are shorter than those whose duration counts, so that the targets share the load equally on a busy machine.
    """
    with system(folder, targets=2, drafts=2, delay=0.0) as (gateway, targets, drafts):
        prompts = [[10 * family + 5] * 48 + [200] for family in range(4)]  # 2 of 4 pages fit
        turns = {family: gateway.complete(p, max_tokens=20, return_token_ids=True) for family, p in enumerate(prompts)}
        first = [service.engine.opened for service in targets]
        assert first == [2, 2]
        for family, answer in turns.items():
            whole = [*prompts[family], *answer["choices"][0]["token_ids"], 201]
            usage = gateway.complete(whole, max_tokens=3)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 64 - PAGE
        assert gateway.metric("outrider_routed_sessions_total", service="target", by="prefix") == 4
        for service in targets:  # targets received disjoint prompts
            others = [other for other in targets if other is not service]
            assert all(common(a, b) == 0 for a in service.engine.seen for o in others for b in o.engine.seen)
        for service in targets:
            service.engine.delay = 0.05  # the stream must outlast the stop of one of them
        stream = Stream(gateway)
        started(stream)
        home = next(service for service in targets if service.sessions)
        away = targets[1 - targets.index(home)]
        home.stop()
        away.engine.delay = away.delay
        assert stream.whole()
        before = away.engine.opened
        gateway.complete(prompts[0], max_tokens=3)
        assert away.engine.opened == before + 1
        home.start()
        until(lambda: gateway.metric("outrider_service_up", service="target") == 2)
        streams = [Stream(gateway) for _ in range(4)]
        assert all(stream.whole() for stream in streams)
        assert home.engine.opened == 2  # it is used again
        assert sum(service.engine.opened for service in drafts) > 8


def test_a_late_target_is_used(folder):
    targets = [Service(Target, f"unix:{folder}/late-{i}", delay=0.05) for i in range(2)]
    shared = Service(Draft, f"unix:{folder}/late-draft")
    gateway = Gateway(folder, [service.address for service in targets], [shared.address])
    running = [service.start() for service in (shared, targets[0])]
    try:
        gateway.wait()
        streams = [Stream(gateway) for _ in range(2)]
        for stream in streams:
            started(stream)
        running.append(targets[1].start())
        until(lambda: gateway.metric("outrider_service_up", service="target") == 2)
        streams += [Stream(gateway) for _ in range(2)]
        until(lambda: [service.engine.opened for service in targets] == [2, 2])
        for service in targets:
            service.engine.delay = 0.01  # the streams may end now
        assert all(stream.whole() for stream in streams)
        assert [service.engine.opened for service in targets] == [2, 2]
        assert shared.engine.opened == 4  # one draft for both
        assert gateway.metric("outrider_accepted_draft_tokens_total") > 0
    finally:
        assert gateway.stop() == 0
        for service in running:
            service.stop()
