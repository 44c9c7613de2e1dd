"""What changes with each constant by which a gateway shares its time, chooses replicas and repeats attempts."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from gateway.admission import retry_after, turns
from gateway.pools.pool import Pool, Routing
from gateway.sessions.session import Session
from gateway.streams import link
from gateway.streams.replica import attempts
from gateway.streams.replica.step_time import StepTime
from gateway.streams.target import TargetLink
from outrider.errors import Overloaded
from outrider.wire.v1 import common_pb2, target_pb2
from tests.support.constants import constant_tests
from tests.support.gateway.requests import request_for

# --- turns of clients ---


def in_turns(run):
    """The result of a coroutine function of turns and a function that sets their clock."""

    async def main():
        time = SimpleNamespace(now=0.0, perf_counter=lambda: time.now)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(turns, "time", time)
            return await run(turns.Turns(), lambda now: setattr(time, "now", now))

    return asyncio.run(main())


async def _texts_at_once(taken, _):
    sent = []
    for number in range(20):
        taken.add(lambda number=number: sent.append(number))
    return len(sent)


async def _texts_before_a_request(taken, _):
    sent = []
    for number in range(100):
        taken.add(lambda number=number: sent.append(number))
    await taken.request()
    return len(sent)


async def _delay_of_late_texts(taken, set_clock):
    for _ in range(20):
        taken.add(lambda: None)
    set_clock(1.0)
    await asyncio.sleep(0)
    return taken.delay


async def _refusals(taken, set_clock):
    """Of requests that come when a text has waited for some seconds."""
    for _ in range(20):
        taken.add(lambda: None)
    refused = []
    for seconds in (3.0, 7.0, 15.0, 30.0):
        set_clock(seconds)
        request = taken.request()
        try:
            request.send(None)
        except Overloaded:
            refused.append(seconds)
        request.close()
    return refused


def spacings():
    """Seconds between frames, by the delay in hundredths of a second."""
    taken, found = turns.Turns(), []
    for hundredth in range(300):
        taken.delay = hundredth / 100
        found.append(taken.spacing())
    return found


def rate_of_ends():
    """Seconds between ends of requests, of which many came fast, and then some slowly."""
    time = SimpleNamespace(now=0.0)
    estimate = retry_after.RetryAfter(lambda: time.now)
    for number in range(600):
        estimate.begin()
        estimate.begin()  # another one runs on
        time.now += 0.01 if number < 500 else 0.1
        estimate.end()
    return estimate.gap(time.now)


TURNS = {
    "turns:_PER_TURN": lambda: in_turns(_texts_at_once),
    "turns:_PER_REQUEST": lambda: in_turns(_texts_before_a_request),
    "turns:_WEIGHT": lambda: in_turns(_delay_of_late_texts),
    "turns:_TOLERATED": spacings,
    "turns:_SHARE": spacings,
    "turns:_MAX_SPACING": spacings,
    "turns:MAX_DELAY": lambda: in_turns(_refusals),
    "retry_after:MAX_SECONDS": lambda: retry_after.bounded(1000.0),
    "retry_after:_MAX_ENDS": rate_of_ends,
}

# --- replicas ---


def target(sessions, step_seconds=0.0):
    """A target with open sessions. step_seconds: of its steps, if they are reported."""
    made = TargetLink("unix:/nowhere")
    made.up = True
    made.info = target_pb2.GetTargetInfoResponse(page_size=16, max_running_sessions=1000, max_session_tokens=1000)
    made.load.session_count = sessions
    for _ in range(100 if step_seconds else 0):
        made.load.step_time.add(report(step_seconds))
    return made


def report(seconds):
    return common_pb2.EngineLoad(step_microseconds=round(1e6 * seconds), running_sessions=1)


def chosen(targets, preferred=()):
    """The place of the target that a new session gets."""
    pool = Pool(Routing())
    for one in targets:
        pool.add(one)
    replica, _ = pool.choose(Session(1, request_for([5] * 20, 5)), targets, preferred)
    return targets.index(replica)


def preferred_loads():
    """Whether a preferred target is chosen, by its sessions, where another one has a hundred."""
    found = []
    for sessions in range(100, 140):
        targets = [target(100), target(sessions)]
        found.append(chosen(targets, targets[1:]))
    return found


def slower_targets():
    """Whether a target with fewer sessions is chosen, by how much longer its steps take, in hundredths."""
    return [chosen([target(100, 0.010), target(60, 0.0001 * hundredth)]) for hundredth in range(100, 300, 4)]


def step_time(*seconds, idle=0.0):
    """Mean seconds of steps, and their weight after some idle seconds."""
    time = SimpleNamespace(now=0.0)
    mean = StepTime(lambda: time.now)
    for one in seconds:
        mean.add(report(one))
    time.now += idle
    return mean.seconds, mean.weight


def pauses(*, starting, stream_seconds=None):
    """Seconds between attempts. stream_seconds: of each stream, if there are any."""
    found = []

    async def attempt():
        if len(found) > 9:
            raise asyncio.CancelledError
        opened = float("inf") if stream_seconds is None else 100.0 - stream_seconds[len(found)]
        return attempts.Attempt(opened, link.MAX_WAIT, starting)

    async def pause(seconds):
        found.append(round(seconds, 9))

    async def serving(_, seconds):
        await pause(seconds)

    class Channel:
        async def __aenter__(self):
            return self

        async def __aexit__(self, *_):
            pass

    async def main():
        repeated = attempts.Attempts("a replica", attempt, Channel)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attempts.asyncio, "sleep", pause)
            patch.setattr(attempts, "wait_serving", serving)
            patch.setattr(attempts, "time", SimpleNamespace(monotonic=lambda: 100.0))
            patch.setattr(attempts, "random", random.Random(1))
            repeated.start()
            while len(found) < 10:
                await _turn()
            await repeated.stop()

    asyncio.run(main())
    return found


def _turn():
    """One turn of the event loop."""
    future = asyncio.get_running_loop().create_future()
    future.get_loop().call_soon(future.set_result, None)
    return future


POOLS = {"pool:_NEAR": preferred_loads, "pool:_LEVEL": slower_targets}
REPLICAS = {
    "step_time:_EMA_WEIGHT": lambda: step_time(*[0.01] * 40, *[0.02] * 5),
    "step_time:_MIN_SECONDS": lambda: step_time(0.0005, 0.003),
    "step_time:_HALF_LIFE": lambda: step_time(0.01, idle=20.0),
    "attempts:_MIN_WAIT": lambda: pauses(starting=False),
    "attempts:MAX_WAIT": lambda: pauses(starting=False),
    "attempts:_STARTING_WAIT": lambda: pauses(starting=True),
    "attempts:_JITTER": lambda: pauses(starting=False),
    "attempts:_STABLE_AFTER": lambda: pauses(starting=False, stream_seconds=[0.5, 0.8, 1.5, 3.0, 5.0] * 2),
}

ALL = {"gateway.admission": TURNS, "gateway.pools": POOLS, "gateway.streams.replica": REPLICAS}

test_a_constant_has_an_effect, test_all_constants_are_explained_and_tested = constant_tests(ALL)
