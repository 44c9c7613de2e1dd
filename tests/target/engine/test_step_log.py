"""Log lines about steps: their shape, their counts, and when they are written."""

import logging
import re

import numpy as np
import pytest

from services.target.engine.step_log import StepLog
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import write_model

PREFILL = re.compile(
    r"Prefill batch\. #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), cache hit rate: ([\d.]+)%, "
    r"token usage: ([\d.]+), #running-req: (\d+), #queue-req: (\d+)$"
)
DECODE = re.compile(
    r"Decode batch\. #running-req: (\d+), #token: (\d+), token usage: ([\d.]+), accept len: ([\d.]+), "
    r"accept rate: ([\d.]+), gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)$"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def lines(caplog):
    """Returns the figures of the lines of a kind so far, and forgets them."""
    caplog.set_level(logging.INFO)

    def found(pattern):
        matches = [pattern.match(record.getMessage()) for record in caplog.records]
        return [tuple(map(float, match.groups())) for match in matches if match]

    return found


def logging_engine(model, interval, **flags):
    engine = engine_of(model, **flags)
    engine.observers.step_log = StepLog(engine.scheduler, interval)
    return engine


def test_a_decode_line_every_interval_of_steps(model, lines):
    engine = logging_engine(model, 10)
    run(engine, [opening(i, [5, 6, 7 + i], max_tokens=26) for i in range(2)])
    decoded = lines(DECODE)
    assert len(decoded) == 2  # 25 steps after the first tokens
    for running, tokens, usage, length, rate, throughput, queued in decoded:
        assert (running, length, rate, queued) == (2, 1, 0, 0)
        assert tokens % 16 == 0 < tokens <= 2 * 32
        assert usage == pytest.approx(tokens / 4096, abs=0.01)
        assert throughput > 0
    [(sequences, new, cached, hits, _, running, _)] = lines(PREFILL)
    assert (sequences, new, cached, hits, running) == (2, 6, 0, 0, 2)


def test_accepted_draft_tokens_are_counted(model, lines):
    text = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=41)]).new[1]
    engine = logging_engine(model, 5)
    wrong = next(token for token in range(5, 40) if token not in text)

    def proposals(session_id, path):
        """Three draft tokens a step, two of them right."""
        done = len(path) - 3
        right = text[done : done + 2]
        return [chain(session_id, path, [*right, wrong])] if done else []

    run(engine, [opening(1, [5, 6, 7], max_tokens=41)], proposals)
    _, _, _, length, rate, _, _ = lines(DECODE)[0]
    assert length == 3
    assert rate == pytest.approx(2 / 3, abs=0.01)


def test_cached_prompts_are_counted(model, lines):
    engine = logging_engine(model, 1000)
    prompt = np.arange(3, 60).tolist()
    run(engine, [opening(1, prompt)])
    engine.check()
    run(engine, [opening(2, prompt)])
    first, second = lines(PREFILL)
    assert (first[:3], second[:3]) == ((1, 57, 0), (1, 9, 48))
    assert second[3] == pytest.approx(100 * 48 / 57, abs=0.01)


def test_prompts_of_a_busy_target_share_a_line(model, lines):
    engine = logging_engine(model, 50, chunked_prefill_size=8, max_running_requests=8)
    run(engine, [opening(i, np.arange(3 + i, 43 + i).tolist(), max_tokens=4) for i in range(5)])
    figures = lines(PREFILL)
    assert len(figures) == 2  # the first prompt, and the rest once the target is idle
    assert sum(line[0] for line in figures) == 5
    assert sum(line[1] for line in figures) == 5 * 40


def test_an_idle_target_logs_nothing(model, lines, caplog):
    engine = logging_engine(model, 1)
    run(engine, [opening(1, [5, 6, 7], max_tokens=3)])
    engine.check()
    caplog.clear()
    for _ in range(3):
        engine.check()
        engine.step()
    assert not caplog.records


def test_multi_step_decoding_counts_every_step(model, lines):
    engine = logging_engine(model, 10, coalesce_seconds=60.0)
    run(engine, [opening(1, [5, 6, 7], max_tokens=41)])
    decoded = lines(DECODE)
    assert decoded
    assert all(length == 1 for _, _, _, length, *_ in decoded)
