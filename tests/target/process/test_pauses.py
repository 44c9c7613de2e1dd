"""Pauses and flushes of a running target."""

from dataclasses import replace

import pytest

from outrider.errors import InvalidRequest, Overloaded
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason
from services.target.process.control import Update
from tests.support.target.controlled import PROMPTS, knowing, requests, started, step
from tests.support.target.driving import GREEDY, opening, run
from tests.support.tiny import write_model, write_tokenizer


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token(folders, texts, mode):
    engine, control = started(folders[0], page_size=4)
    tokens = {request.session_id: request.tokens.tolist() for request in requests(1.0)}
    for request in requests(1.0)[:3]:
        engine.open(request)
    for _ in range(4):
        step(engine, tokens, knowing(texts[0, 1.0]))
    assert control.pause(mode) == 0
    assert engine.idle
    engine.open(requests(1.0)[3])  # it waits
    assert engine.idle
    assert engine.scheduler.running == (0 if mode == "retract" else 3)
    assert engine.load().paused
    engine.check()
    control.proceed()
    assert not engine.load().paused
    while not engine.idle:
        step(engine, tokens, knowing(texts[0, 1.0]))
    assert {i: path[len(PROMPTS[i - 1]) :] for i, path in tokens.items()} == texts[0, 1.0]


def test_a_pause_can_abort(folders):
    engine, control = started(folders[0])
    for request in requests(0.0):
        engine.open(request)
    engine.step()
    assert control.pause("abort") == 4
    assert [commit.finish_reason for commit in engine.step().commits] == [FinishReason.ABORT] * 4
    assert engine.idle
    engine.open(opening(9, [5, 6], GREEDY, max_tokens=2))
    assert engine.idle
    control.proceed()
    assert not engine.idle
    engine.step()


def test_the_cache_is_flushed_only_while_nothing_runs(folders):
    engine, control = started(folders[0], page_size=4)
    run(engine, requests(0.0))
    assert len(engine.scheduler.prefix) > 0
    engine.open(requests(0.0)[0])
    for act in (lambda: None, engine.step, lambda: control.pause("in_place")):
        act()
        with pytest.raises(InvalidRequest, match="under way"):
            control.flush_cache()
    control.pause("retract")
    control.flush_cache()
    assert len(engine.scheduler.prefix) == 0
    engine.check()


@pytest.mark.parametrize("flush", ["update", "flush"])
def test_a_session_that_waited_for_a_grammar_shares_pages(tmp_path, flush):
    folder = write_tokenizer(write_model(tmp_path))
    engine, control = started(folder, page_size=4)
    control.pause("in_place")
    for i in (1, 2):
        engine.open(opening(i, PROMPTS[1], max_tokens=3, grammar=Grammar(GrammarKind.REGEX, "[a-z]+")))
    if flush == "update":
        control.update_from_folder(control.read_folder(str(folder)), Update())
    else:
        control.flush_cache()
    engine.sessions.grammars.wait(60)
    control.proceed()
    cached = {}
    while not engine.idle:
        for commit in engine.step().commits:
            cached.setdefault(commit.session_id, commit.cached_tokens)
    assert cached == {1: 0, 2: 44}
    engine.check()


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_no_session_starts_during_a_pause(folders, mode):
    engine, control = started(folders[0], page_size=4, max_queued_requests=1, max_running_requests=4)
    control.pause(mode)
    wanted = [replace(requests(0.0)[0], session_id=i) for i in range(1, 7)]
    for request in wanted[:5]:  # four places, and one who waits
        engine.open(request)
    with pytest.raises(Overloaded, match="5 requests wait already"):
        engine.open(wanted[5])
    assert engine.scheduler.running == 0
    control.flush_cache()
    control.proceed()
    ended = 0
    while not engine.idle:
        ended += sum(commit.finish_reason is not FinishReason.RUNNING for commit in engine.step().commits)
    assert ended == 5
