"""Work for clients in turns."""

import asyncio
import itertools

import pytest

from gateway.admission import turns as turns_module
from gateway.admission.turns import MAX_DELAY, Turns
from gateway.sessions.inbox import Inbox
from outrider.errors import Overloaded
from outrider.speculation.proposal import FinishReason


async def test_work_is_done_in_order_and_streams_are_read_in_between():
    turns, done, reads = Turns(), [], []

    def read():
        reads.append(len(done))
        if len(done) < 30:
            asyncio.get_running_loop().call_soon(read)

    for number in range(30):
        turns.add(lambda number=number: done.append(number))
    assert done == [0, 1, 2, 3]  # a gateway that keeps up lets nothing wait
    read()
    while len(done) < 30:
        await asyncio.sleep(0)
    assert done == list(range(30))
    steps = [later - earlier for earlier, later in itertools.pairwise(reads)]
    assert [step for step in steps if step] == [4] * 6 + [2]


async def test_requests_wait_for_some_texts_and_texts_for_few_requests():
    turns, done = Turns(), []

    async def request(name):
        await turns.request()
        done.append(name)

    for number in range(30):
        turns.add(lambda number=number: done.append(number))
    requests = [asyncio.create_task(request(name)) for name in "abcd"]
    requests[1].cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    places = {name: done.index(name) for name in "acd"}
    assert [one for one in done if one not in places] == list(range(30))
    assert list(places) == sorted(places, key=places.get)
    assert all(8 <= later - earlier <= 13 for earlier, later in itertools.pairwise((0, *places.values())))


async def test_a_request_to_an_idle_gateway_does_not_wait():
    with pytest.raises(StopIteration):
        Turns().request().send(None)


async def test_commits_that_come_before_a_turn_are_one_piece_of_text():
    turns = Turns()
    inboxes = [Inbox([], turns.add) for _ in range(9)]
    for token in range(3):
        for inbox in inboxes:
            inbox.put([token], FinishReason.RUNNING, None)
    taken = [(await inbox.next()).tokens for inbox in inboxes]
    assert taken == [[0, 1, 2]] * 9
    late = asyncio.create_task(inboxes[0].next())
    await asyncio.sleep(0.01)
    assert not late.done()  # nothing is left of what was taken
    inboxes[0].put([3], FinishReason.LENGTH, None)
    assert (await late).tokens == [3]


async def test_a_gateway_that_is_late_sends_fewer_frames_until_it_has_caught_up():
    turns = Turns()
    assert turns.spacing() == 0.0
    turns.delay = 0.01  # of a burst
    assert turns.spacing() == 0.0
    turns.delay = 0.4
    assert turns.spacing() == pytest.approx(0.1)
    turns.delay = 60.0
    assert turns.spacing() == 0.25
    for _ in range(200):
        turns.add(lambda: None)
        await asyncio.sleep(0)
    assert turns.spacing() == 0.0


async def test_a_gateway_that_is_very_late_refuses_requests_until_it_has_caught_up(monkeypatch):
    turns, now = Turns(), 100.0
    monkeypatch.setattr(turns_module.time, "perf_counter", lambda: now)
    for _ in range(8):
        turns.add(lambda: None)
    now += MAX_DELAY + 0.5
    with pytest.raises(Overloaded, match=rf"answers come {MAX_DELAY + 0.5} s late") as caught:
        await turns.request()
    assert caught.value.retry_after == 11
    assert turns.delay < 0.5
    await asyncio.sleep(0.01)
    await turns.request()
    assert turns.delay > 0.5
