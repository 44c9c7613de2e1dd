"""What `bench scale` stands on: the draft that knows the answers, the slow network, and what theory expects."""

import argparse
import asyncio
import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bench.services.target
from bench.harness import report
from bench.harness.errors import BenchError
from bench.scale import run, system
from bench.scale.delay import serve
from bench.scale.oracle import OracleEngine, Text
from bench.scale.run import main, step_costs
from bench.scale.system import Draft, Generation
from bench.scale.theory import expected_tokens, draft_if_ready, speedup, wait_for_draft
from outrider.serving.messages import OpenSession
from outrider.speculation.proposal import Commit, FinishReason, path_hash
from outrider.speculation.sampling import SamplingParams, StopConditions
from tests.support.tiny import write_model, write_tokenizer

TEXT = np.arange(100, 400, dtype=np.uint32)


def oracle(acceptance, count=8):
    engine = OracleEngine([Text(0, TEXT.tolist(), acceptance)], acceptance, 0.0, count)
    engine.open(OpenSession(1, TEXT[:10], 10, SamplingParams(), StopConditions(500)))
    return engine


def commit(start, tokens, reason=FinishReason.RUNNING):
    tokens = np.asarray(tokens, np.uint32)
    root = path_hash(np.concatenate([TEXT[:start], tokens]))
    return Commit(1, start, tokens, root, finish_reason=reason)


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_the_oracle_is_right_as_often_as_it_is_told(acceptance):
    engine = oracle(acceptance)
    right = []
    for start in range(10, 290):
        engine.receive((), [commit(start, TEXT[start : start + 1])])
        (proposal,) = engine.step().proposals
        assert (proposal.anchor_length, proposal.anchor_hash) == (start + 1, path_hash(TEXT[: start + 1]))
        assert proposal.parents.tolist() == list(range(-1, len(proposal.tokens) - 1))
        right.append(bool(proposal.tokens[0] == TEXT[start + 1]))
    assert engine.idle
    assert np.mean(right) == pytest.approx(acceptance, abs=0.1)
    assert {0.0: not any(right), 1.0: all(right)}.get(acceptance, True)


def test_it_falls_silent_where_the_text_is_another_one_or_over():
    for last in (commit(10, [7]), commit(10, TEXT[10:12], FinishReason.LENGTH)):
        engine = oracle(1.0)
        engine.receive((), [last])
        assert engine.idle


def test_the_network_hands_everything_on_in_order_and_late(tmp_path):
    near, far, delay = str(tmp_path / "near"), str(tmp_path / "far"), 0.05

    async def echo(reader, writer):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
        writer.close()

    async def talk():
        server = await asyncio.start_unix_server(echo, far)
        network = asyncio.create_task(serve(near, far, delay))
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_unix_connection(near)
        sent = np.random.default_rng(0).bytes(1 << 20)
        start = time.monotonic()
        writer.write(b"ping")
        assert await reader.readexactly(4) == b"ping"
        assert time.monotonic() - start >= 2 * delay
        writer.write(sent)
        writer.write_eof()
        assert await reader.read() == sent
        writer.close()
        network.cancel()
        server.close()

    asyncio.run(talk())


def test_theory_at_its_ends():
    def cost(speculate):
        return 0.01 + 0.0005 * speculate

    assert expected_tokens(0.0, 5) == 1.0
    assert expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert speedup(0.0, cost, 0.001, 8) == 1.0  # plain steps at worst
    assert speedup(1.0, cost, 10.0, 8) == pytest.approx(8 * cost(0) / cost(7), rel=1e-6)  # never waits for a slow draft
    assert wait_for_draft(0.8, 4, cost, 0.0) > wait_for_draft(0.8, 4, cost, 0.02)
    assert draft_if_ready(0.8, 4, cost, 0.02, 8) >= 1 / cost(0)
    ratios = [speedup(a / 10, cost, 0.002, 8) for a in range(11)]
    assert ratios == sorted(ratios)


def test_steps_are_measured_at_the_context_of_each_point(tmp_path, monkeypatch):
    """With a model, and once for each context; one that leaves no room for the steps is as long as it can be."""
    model = write_model(tmp_path / "model", max_position_embeddings=400)
    opened = []

    def remembered(session_id, prompt, new):
        opened.append(len(prompt))
        return open_request(session_id, prompt, new)

    open_request = bench.target.open_request
    monkeypatch.setattr(bench.target, "opening", remembered)
    monkeypatch.setattr("bench.scale.run._ROWS", (1, 3))
    monkeypatch.setattr("bench.scale.run._STEPS", 2)
    costs = step_costs(str(model), "float32", [24, 120, 399])
    assert opened == [24, 120, 400 - 2 * (2 + 4) - 4]
    assert list(costs) == [24, 120, 399]
    assert all(cost(0) > 0 for cost in costs.values())


def test_what_is_expected_is_of_the_points_own_context(monkeypatch):
    @contextlib.contextmanager
    def gateway(*_):
        yield "nowhere"

    async def generate(_, asked, new, speculate):
        return [Generation((1,) * new, 10.0, 1.0) for _ in asked]

    for name, instead in (("gateway", gateway), ("tell", generate), ("remember", lambda *_: None)):
        monkeypatch.setattr(run, name, instead)
    monkeypatch.setattr(run, "prompts", lambda _, context, count: [[0] * context] * count)
    args = argparse.Namespace(new_tokens=4, rounds=1)
    costs = {100: lambda speculate: 0.01 + 0.001 * speculate, 4000: lambda speculate: 0.02 + 0.01 * speculate}
    draft = Draft(0.8, 0.0, 0.0, 4)
    points = [run.measure_point(Path(), Path(), "", run.Cell("context", n, n, 1, draft), args, costs) for n in costs]
    assert [point["expected"] for point in points] == [speedup(0.8, cost, run.STREAM_LATENCY, 4) for cost in costs.values()]
    assert points[0]["expected"] > points[1]["expected"]


async def test_answers_that_come_at_once_tell_of_no_rate(monkeypatch):
    class Client(contextlib.AbstractAsyncContextManager):
        def __init__(self, _):
            pass

        async def generate(self, prompt, **options):
            yield SimpleNamespace(token_ids=[1] * options["max_tokens"], speculation=SimpleNamespace(steps=1))

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(system, "AsyncClient", Client)
    with pytest.raises(BenchError, match="--new-tokens"):
        await system.generate("nowhere", [[1, 2]], 4, speculate=False)


@pytest.mark.system
def test_two_axes_of_a_tiny_model(tmp_path, monkeypatch):
    """The page and its plot are there from the first point on, when other axes have none yet."""
    monkeypatch.setattr(report, "_chosen", tmp_path)
    model = write_tokenizer(write_model(tmp_path / "model"))
    sizes = ["--contexts", "32", "--sessions", "2", "--context", "32", "--new-tokens", "24", "--rounds", "2"]
    main(["--model-path", str(model), "--axes", "context", "sessions", *sizes])
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert [(row["axis"], row["value"], "expected" in row) for row in rows] == [
        ("context", 32, True),
        ("sessions", 2, False),
    ]
    assert all(row["plain tokens/s"] > 0 and row["accept length"] >= 1.0 for row in rows)
    assert (tmp_path / "scale.png").stat().st_size > 1000
