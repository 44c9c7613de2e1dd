"""Starting the answers of one request, without services."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from gateway.admission.admission import Admission
from gateway.admission.caller import CALLER, Caller
from gateway.orchestration import generator as module
from gateway.orchestration.generator import MAX_PROMPT_TOKENS, MAX_STOP_TOKENS, Generator
from gateway.sessions.request import GenerationRequest, StopOptions
from outrider.errors import InvalidRequest
from outrider.speculation.sampling import SamplingParams
from tests.support.gateway.engines import CONTEXT, VOCAB

SAMPLING = SamplingParams()


@pytest.fixture
def generator():
    nothing = SimpleNamespace(sessions=SimpleNamespace(max_session_tokens=CONTEXT))
    return Generator(
        nothing, None, None, name="m", vocab_size=VOCAB, max_session_tokens=CONTEXT, admission=Admission(limit=2000)
    )


@pytest.fixture
def started(generator, monkeypatch):
    """The requests of started generations."""
    found = []
    monkeypatch.setattr(generator, "start", lambda request, *_: found.append(request) or request)
    return found


def test_choices_differ_only_in_their_seeds():
    request = GenerationRequest([5], SAMPLING, StopOptions(3), seed=7)
    assert [one.seed for one in request.choices(3)] == [7, 8, 9]
    assert len({id(one.sampling) for one in request.choices(3)}) == 1
    assert GenerationRequest([5], SAMPLING).choices(2) == [GenerationRequest([5], SAMPLING)] * 2


@pytest.mark.parametrize(("breath", "turns"), [(0.0, 8), (math.inf, 1)])
async def test_other_coroutines_run_while_many_answers_are_started(generator, started, monkeypatch, breath, turns):
    monkeypatch.setattr(module, "_TURN_SECONDS", breath)
    seen = set()

    async def other():
        while True:
            seen.add(len(started))
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    requests = GenerationRequest([5], SAMPLING).choices(8)
    assert await generator.start_all([(one, "name") for one in requests]) == requests
    task.cancel()
    assert len(seen) == turns


@pytest.mark.parametrize(
    ("abort", "ended"),
    [
        (lambda generator: generator.abort("q", "me"), [False, True, True, True, False]),
        (lambda generator: generator.abort("q-1", "me"), [False, False, True, False, False]),
        (lambda generator: generator.abort("q", None), [False, True, True, True, False]),
        (lambda generator: generator.abort("q", ""), [False] * 5),  # another caller's
        (lambda generator: generator.abort("q-", "me"), [False] * 5),
        (lambda generator: generator.abort_all(), [False, True, True, True, True]),
    ],
)
async def test_answers_aborted_before_their_start_end_at_once(generator, monkeypatch, abort, ended):
    """The first answer is started by then, and the generator does not track it here."""
    found = []

    def start(*_):
        found.append(SimpleNamespace(aborted=False))
        found[-1].abort = lambda own=found[-1]: vars(own).update(aborted=True)
        return found[-1]

    monkeypatch.setattr(generator, "start", start)
    generator.orchestrator.sessions.abort_all = lambda: 0
    request = GenerationRequest([5], SAMPLING)
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.0)
    names = (("q-0", "q"), "q", ("q-1", "q"), ("q-2", "q"), "q2")
    CALLER.set(Caller("me"))
    starting = asyncio.create_task(generator.start_all([(request, name) for name in names]))
    while not found:
        await asyncio.sleep(0)
    abort(generator)
    await starting
    assert [one.aborted for one in found] == ended
    await generator.start_all([(request, "other")])
    assert not found[-1].aborted


@pytest.mark.parametrize(
    ("prompt", "count", "message"),
    [
        (1, 2000, None),
        (1, 2001, "has 2001 answers; at most 2000"),
        (MAX_PROMPT_TOKENS // 1000, 1000, None),
        (MAX_PROMPT_TOKENS // 1000 + 1, 1000, f"{(MAX_PROMPT_TOKENS // 1000 + 1) * 1000} tokens in all"),
        (MAX_PROMPT_TOKENS + 1, 1, None),  # a single prompt is checked against the context only
    ],
)
async def test_answers_and_prompt_tokens_of_a_request_are_bounded(generator, started, prompt, count, message):
    requests = [(one, "") for one in GenerationRequest([5] * prompt, SAMPLING, prompt_field="text").choices(count)]
    if message is None:
        assert len(await generator.start_all(requests)) == count
        return
    with pytest.raises(InvalidRequest, match=message):
        await generator.start_all(requests)
    assert not started


def test_stop_tokens_are_bounded(generator):
    request = GenerationRequest([5], SAMPLING, StopOptions(token_ids=(5,) * (MAX_STOP_TOKENS + 1)))
    with pytest.raises(InvalidRequest, match="1024 stop tokens") as caught:
        generator.start(request)
    assert caught.value.param == "stop_token_ids"
