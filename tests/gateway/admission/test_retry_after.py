"""Retry-After of refused requests."""

import httpx
import pytest

from gateway.admission.admission import Admission, Keys
from gateway.admission.caller import Caller
from gateway.admission.retry_after import MAX_SECONDS, RetryAfter
from outrider.client import Client
from outrider.config import GatewayConfig
from outrider.errors import Overloaded, TooManyRequests
from tests.support.gateway.engines import BUSY
from tests.support.gateway.services import until


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def full(clock, slots, seconds, ends):
    """The estimate of `slots` admission slots in use for `seconds`, in which `ends` requests finished."""
    retry_after = RetryAfter(clock)
    for _ in range(slots):
        retry_after.begin()
    for _ in range(ends):
        clock.now += seconds / ends
        retry_after.end()
        retry_after.begin()
    clock.now += 0 if ends else seconds
    return retry_after


@pytest.mark.parametrize(("ends", "seconds"), [(40, 1), (4, 5), (2, 10), (1, 20)])
def test_retry_after_follows_the_rate_of_finished_requests(clock, ends, seconds):
    assert full(clock, 8, 20.0, ends).next() == seconds


def test_each_refused_client_gets_the_next_slot(clock):
    retry_after = full(clock, 8, 20.0, 4)
    assert [retry_after.next() for _ in range(4)] == [5, 10, 15, 20]
    clock.now += 20  # and no client came
    retry_after.end()
    assert retry_after.next() <= 10
    assert [retry_after.next() for _ in range(50)][-1] == MAX_SECONDS


def test_before_the_first_end_retry_after_is_the_time_so_far(clock):
    assert full(clock, 3, 7.0, 0).next() == 7
    assert full(clock, 3, 300.0, 0).next() == MAX_SECONDS
    assert full(clock, 3, 0.01, 0).next() == 1


def test_old_ends_do_not_count(clock):
    retry_after = full(clock, 2, 20.0, 400)
    clock.now += 50
    assert retry_after.next() == 1, "of the last minute, 10 s were fast"
    clock.now += 100
    assert retry_after.next() == MAX_SECONDS


def test_idle_time_and_refusals_do_not_count(clock):
    retry_after = full(clock, 1, 20.0, 2)
    retry_after.end()
    clock.now += 1000
    retry_after.begin()
    clock.now += 3
    retry_after.begin()
    retry_after.end(refused=True)
    assert retry_after.next() == 3


def test_of_many_ends_the_latest_count(clock):
    retry_after = full(clock, 2, 50.0, 1000)
    assert retry_after.gap(clock.now) == pytest.approx(0.05, rel=0.02)


def test_admission_and_keys_set_retry_after():
    admission = Admission(1)
    admission.enter()
    with pytest.raises(Overloaded) as caught:
        admission.enter()
    assert caught.value.retry_after == 1
    keys = Keys(GatewayConfig(max_requests_per_key=1))
    caller = Caller("a")
    with keys.request(caller), pytest.raises(TooManyRequests) as caught, keys.request(caller):
        pass
    assert caught.value.retry_after == 1


def test_a_full_target_sets_retry_after_in_rest_and_grpc(gateway, target):
    stream = httpx.stream("POST", f"{gateway.url}/v1/completions", timeout=30,
                          json={"prompt": "A", "max_tokens": 250, "ignore_eos": True, "stream": True})  # fmt: skip
    target.engine.delay = 0.05
    try:
        with stream:
            until(lambda: target.sessions == 1)
            values = []
            for _ in range(4):
                response = gateway.client.post("/v1/completions", json={"prompt": [5, BUSY]})
                assert response.status_code == 503
                values.append(int(response.headers["retry-after"]))
            with Client(f"127.0.0.1:{gateway.grpc_port}") as client, pytest.raises(Overloaded) as caught:
                client.complete([5, BUSY])
            assert caught.value.retry_after >= 1
            assert values == sorted(values), "each got a later slot"
    finally:
        target.engine.delay = target.delay
