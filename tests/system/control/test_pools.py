"""A pool of two real targets and two real draft services: the same tokens on every replica."""

import pytest

from services.draft.drafters.ngram import NgramDrafter, NgramOptions
from tests.support.gateway.services import Gateway, until
from tests.support.gateway.streaming import Stream, started
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import write_model, write_tokenizer

PROMPTS = [list(range(first, first + 40)) for first in (3, 60, 120)]
OPTIONS = {"max_tokens": 400, "temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Targets of different sizes, a draft service for both, and a gateway."""
    tmp_path = tmp_path_factory.mktemp("pool")
    folder = write_tokenizer(write_model(tmp_path / "model", seed=1, num_hidden_layers=2))
    services = [
        target_service(folder, f"unix:{tmp_path}/target0", max_running_requests=4),
        target_service(folder, f"unix:{tmp_path}/target1", max_running_requests=8, page_size=32),
        draft_service(f"unix:{tmp_path}/draft", lambda: NgramDrafter(NgramOptions())),
    ]
    running = [service.start() for service in services]
    gateway = Gateway(tmp_path, [service.address for service in services[:2]], [services[2].address]).wait()
    until(lambda: gateway.metric("outrider_service_up", service="target") == 2)
    yield gateway, services
    assert gateway.stop() == 0
    for service in running:
        service.stop()


def test_sessions_move_between_real_targets_and_keep_their_tokens(pool):
    gateway, targets = pool[0], pool[1][:2]
    plain = [gateway.complete(prompt, **OPTIONS)["choices"][0]["token_ids"] for prompt in PROMPTS]
    again = [gateway.complete([*prompt, *tokens], max_tokens=4) for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400 for answer in again)
    assert gateway.metric("outrider_routed_sessions_total", service="target", by="prefix") == len(PROMPTS)
    for target in targets:
        target.pause = 0.05  # until one of them has ended, no stream must
    streams = [Stream(gateway, prompt=prompt, **OPTIONS) for prompt in PROMPTS]
    for stream in streams:
        started(stream)
    targets[0].stop()
    for target in targets:
        target.pause = 0.0
    for stream in streams:
        stream.join(60)
    assert [stream.tokens for stream in streams] == plain
    assert gateway.metric("outrider_reopened_sessions_total", service="target") > 0
    targets[0].start()
    until(lambda: gateway.metric("outrider_service_up", service="target") == 2)
    streams = [Stream(gateway, prompt=prompt, **OPTIONS) for prompt in PROMPTS for _ in range(2)]
    for stream in streams:
        stream.join(60)
    assert [stream.tokens for stream in streams] == [tokens for tokens in plain for _ in range(2)]
    fresh = [Stream(gateway, prompt=list(range(first, first + 40)), **OPTIONS) for first in (10, 30, 80, 100)]
    for stream in fresh:  # no target has cached their prefixes, so they are divided among both
        stream.join(60)
    until(lambda: gateway.metric("outrider_engine_cached_pages", address=targets[0].address) > 0)


def test_real_targets_leave_and_join_in_the_middle_of_streams(pool):
    gateway, targets = pool[0], pool[1][:2]
    plain = [gateway.complete(prompt, **OPTIONS)["choices"][0]["token_ids"] for prompt in PROMPTS]
    reopened = gateway.metric("outrider_reopened_sessions_total", service="target")
    for target in targets:
        target.pause = 0.01
    streams = [Stream(gateway, prompt=prompt, **OPTIONS) for prompt in PROMPTS]
    for leaves in targets:  # one after the other, so that every stream moves
        counts = [len(stream.tokens) for stream in streams]
        until(lambda counts=counts: all(len(s.tokens) > n + 10 for s, n in zip(streams, counts, strict=True)))
        gateway.client.delete(f"/workers/{leaves.address}", headers=gateway.admin).raise_for_status()
        until(lambda leaves=leaves: not gateway.metric("outrider_service_state", address=leaves.address))
        gateway.client.post("/workers", json={"url": leaves.address}, headers=gateway.admin).raise_for_status()
        until(lambda leaves=leaves: gateway.metric("outrider_service_up", address=leaves.address) == 1)
    for target in targets:
        target.pause = 0.0
    for stream in streams:
        stream.join(60)
    assert [stream.tokens for stream in streams] == plain
    assert gateway.metric("outrider_reopened_sessions_total", service="target") >= reopened + len(PROMPTS)
