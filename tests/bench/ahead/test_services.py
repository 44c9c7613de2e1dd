"""A run's switches: the target's pace, mode and counts, the head's mode, and the network's delay."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from bench.ahead.control import Counts, Mode, Setting, Watch, read_counts, write
from bench.ahead.draft import SwitchedDraft
from bench.ahead.network import delayed
from bench.ahead.run import add_expected, add_rows
from bench.ahead.system import Answer
from bench.ahead.target import PacedTarget
from bench.harness.report import Report
from services.target.speculation.modes.mode import SpeculationMode
from tests.support.target.driving import chain, engine_of, load_model, opening, run
from tests.support.tiny import write_model


def test_a_setting_is_read_once_after_each_change(tmp_path):
    file = tmp_path / "control"
    write(file, Setting(Mode.OWN, 20.0, 5.0))
    watch = Watch(file)
    assert watch.changed() == Setting(Mode.OWN, 20.0, 5.0)
    assert watch.changed() is None
    write(file, Setting(Mode.AUTO, 40.0, 5.0))
    assert watch.changed() == Setting(Mode.AUTO, 40.0, 5.0)


def test_a_paced_target_takes_its_time_and_counts_steps(tmp_path):
    engine = engine_of(load_model(write_model(tmp_path / "model")))
    text = run(engine, [opening(1, [5, 6, 7], max_tokens=12)]).new[1]
    control, counts = tmp_path / "control", tmp_path / "counts"
    write(control, Setting(Mode.TIERS, 4.0, 0.0))
    PacedTarget(engine, control, counts)
    assert read_counts(counts) == Counts()

    def proposals(session_id, path):  # right ones, in every second step
        done = len(path) - 3
        return [chain(session_id, path, text[done : done + 2])] if done % 2 and done < 10 else []

    start = time.perf_counter()
    result = run(engine, [opening(2, [5, 6, 7], max_tokens=12)], proposals)
    assert result.new[2] == text
    assert time.perf_counter() - start >= 0.004 * result.steps
    found = read_counts(counts)
    assert (found.sessions, found.steps) == (1, result.steps - 1)
    assert 0 < found.drafted < found.steps
    assert engine.speculation.policy.mode is SpeculationMode.DRAFT_IF_READY
    policy = engine.speculation.policy
    for mode, expected in ((Mode.WAITING, SpeculationMode.WAIT_FOR_DRAFT), (Mode.TIERS, policy.mode)):
        write(control, Setting(mode, 0.0 if mode is Mode.WAITING else 4.0, 0.0))
        run(engine, [opening(3, [5, 6], max_tokens=2)])
        assert engine.speculation.policy.mode is expected
    assert engine.speculation.policy is policy, "what was measured under the same setting stays"


def test_a_switched_head(tmp_path):
    opened, changed = [], []
    engine, drafter = SimpleNamespace(open=opened.append), SimpleNamespace(features_changed=changed.append)
    file = tmp_path / "control"
    write(file, Setting(Mode.WAITING, 20.0, 5.0))
    SwitchedDraft(engine, drafter, file)
    fresh, survived = SimpleNamespace(root_expanded=False), SimpleNamespace(root_expanded=True)
    for mode, ahead, seen in (
        (Mode.WAITING, False, [fresh, survived]), (Mode.OWN, True, [fresh]), (Mode.TIERS, True, [fresh, survived]),
    ):  # fmt: skip
        write(file, Setting(mode, 20.0, 5.0))
        engine.open(mode)
        changed.clear()
        for session in (fresh, survived):
            drafter.features_changed(session)
        assert (drafter.drafts_ahead, changed) == (ahead, seen)
    assert opened == [Mode.WAITING, Mode.OWN, Mode.TIERS]


def test_a_delay_changes_while_a_connection_is_open(tmp_path):
    async def talk(delay):
        ended = asyncio.Event()

        async def echo(reader, writer):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
            writer.close()
            await writer.wait_closed()
            ended.set()

        async with await asyncio.start_unix_server(echo, tmp_path / "far"):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "near")
            for delay.seconds in (0.0, 0.05):
                yield min([await round_trip(reader, writer) for _ in range(5)])
            writer.close()
            await writer.wait_closed()
            await ended.wait()

    async def round_trip(reader, writer):
        start = time.monotonic()
        writer.write(b"ping")
        await reader.readexactly(4)
        return time.monotonic() - start

    async def both(delay):
        return [seconds async for seconds in talk(delay)]

    with delayed(tmp_path / "near", tmp_path / "far") as delay:
        end = time.monotonic() + 60
        while not (tmp_path / "near").exists() and time.monotonic() < end:
            time.sleep(0.01)
        near, far = asyncio.run(both(delay))
    assert far >= 0.1 > near


def test_rows_and_what_is_expected_of_them():
    report, cells = Report("ahead", "title"), ((0.0, 50.0, 2.5), (10.0, 90.0, 2.5))
    for delay, waiting_ms, tau in cells:
        answers = {
            "plain": [Answer((), 25.0, 100, 0, 100)],
            "waiting": [Answer((), 1e3 * tau / waiting_ms, 40, 40, 100)],
            "two tiers": [Answer((), 43.75, 57, 28, 100)],
        }
        add_rows(report, 40.0, delay, answers)
    add_expected(report.rows)
    by_cell = {(row["delay ms"], row["mode"]): row for row in report.rows}
    waiting, tiers = by_cell[0.0, "waiting"], by_cell[0.0, "two tiers"]
    assert waiting["accept length"] == pytest.approx(2.5)
    assert waiting["in time"] == 1.0
    assert tiers["to waiting"] == pytest.approx(43.75 / 50)
    assert waiting["to plain"] == pytest.approx(2.0)
    assert waiting["expected"] == pytest.approx(2.5 / 0.046)
    assert by_cell[10.0, "waiting"]["expected"] == pytest.approx(2.5 / 0.066)
    assert tiers["expected"] == pytest.approx(by_cell[10.0, "two tiers"]["expected"]), "the answer is in time in both"
