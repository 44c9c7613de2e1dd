"""Children that end, refuse to start or hang, and killed supervisors: all of them real processes."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from outrider.process.backoff import Backoff
from outrider.supervisor import processes
from outrider.supervisor.draft_watch import DraftWatch
from outrider.supervisor.health import is_healthy
from outrider.supervisor.processes import Child
from outrider.telemetry import LOG_NAME
from tests.support.outrider.children import HEALTHY, STUBBORN, child, gone, run, wait_gone


async def until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def supervised(*children):
    """Ready children, stopped in order afterwards."""
    stop = asyncio.Event()
    task = asyncio.create_task(run(children, stop))
    await until(lambda: all(c.ready for c in children) or task.done())
    yield task
    stop.set()
    assert await task is None
    assert all(c.pid is None for c in children)


def test_waits_double_up_to_the_longest():
    waits = Backoff().waits()
    assert [next(waits) for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]


async def test_a_killed_child_comes_back_and_is_healthy():
    one, other = child(HEALTHY), child(HEALTHY)
    async with supervised(one, other):
        old, untouched = one.pid, other.pid
        os.kill(old, signal.SIGKILL)
        await until(lambda: one.pid not in (old, None))
        await one.wait_ready()
        assert await is_healthy(one.address)
        assert other.pid == untouched


async def test_a_child_has_its_name_for_the_log():
    lines = []
    one = Child("target-2", [sys.executable, "-c", f"import os; print(os.environ['{LOG_NAME}'])"], "", lines.append)
    assert await one._run_once() == 0
    assert lines == ["target-2"]


async def test_a_child_that_is_stopped_is_killed_and_comes_back():
    lines = []
    one = child(HEALTHY, on_line=lines.append)
    one.silent_seconds = 0.4
    async with supervised(one):
        old = one.pid
        await asyncio.sleep(0.2)  # it has answered the supervisor
        os.kill(old, signal.SIGSTOP)
        await until(lambda: one.pid not in (old, None))
        await one.wait_ready()
        again = one.pid
        await asyncio.sleep(0.6)
        assert one.pid == again, "a process that answers is left alone"


async def test_waits_grow_and_are_reset_after_a_long_run(caplog):
    one = child(HEALTHY, backoff=Backoff(first=0.01, longest=0.04, reset_after=1.0))
    async with supervised(one):
        for run in range(4):
            if run == 3:
                await asyncio.sleep(1.0)
            pid = one.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: one.pid not in (pid, None))
    waits = [record.args[-1] for record in caplog.records if "restarting it" in record.message]
    assert waits == [0.01, 0.02, 0.04, 0.01]


async def test_a_refused_configuration_ends_all():
    lines = []
    refuser = child("import sys; print('no such model'); sys.exit(2)", on_line=lines.append)
    other = child(HEALTHY)
    assert await asyncio.wait_for(run([other, refuser]), 60) is refuser
    assert (refuser.gave_up, refuser.reason, lines) == (2, "no such model", ["no such model"])
    assert other.pid is None


async def test_a_configuration_may_be_refused_soon_after_its_process_was_ready(tmp_path):
    mark = tmp_path / "refuse"
    script = (
        f"import os, threading, time\ndef watch():\n    while not os.path.exists({str(mark)!r}): time.sleep(0.01)\n"
    )
    script += "    os._exit(2)\nthreading.Thread(target=watch, daemon=True).start()\n" + HEALTHY
    refuser = child(script)
    task = asyncio.create_task(run([refuser]))
    await refuser.wait_ready()
    mark.touch()
    assert await asyncio.wait_for(task, 60) is refuser
    assert refuser.gave_up == 2


async def test_code_2_in_a_later_run_is_an_ordinary_end(tmp_path):
    mark = tmp_path / "lived"
    script = f"import os, sys\nif os.path.exists({str(mark)!r}) and len(open({str(mark)!r}).read()) == 1:\n"
    script += f"    open({str(mark)!r}, 'a').write('x'); sys.exit(2)\nopen({str(mark)!r}, 'a').write('x')\n" + HEALTHY
    one = child(script)
    async with supervised(one):
        os.kill(one.pid, signal.SIGKILL)
        await until(lambda: mark.read_text() == "xxx")
        await one.wait_ready()


async def test_one_that_cannot_start_is_given_up(monkeypatch):
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 3)
    lines = []
    broken = child("print('start'); raise SystemExit('broken')", on_line=lines.append)
    assert await asyncio.wait_for(run([broken]), 60) is broken
    assert lines == ["start", "broken"] * 3
    assert broken.gave_up == 1


async def test_an_optional_one_is_restarted_until_it_starts_and_the_others_run_on(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 2)
    mark, ends = tmp_path / "mended", []
    broken = f"import os\nif not os.path.exists({str(mark)!r}): raise SystemExit('error: no memory')\n" + HEALTHY
    optional, other = child(broken), child(HEALTHY)
    optional.optional, optional.on_end = True, lambda code, wait: ends.append((code, optional.reason))
    stop = asyncio.Event()
    task = asyncio.create_task(run([optional, other], stop, starting=other.wait_ready()))
    await other.wait_ready()
    untouched = other.pid
    await until(lambda: len(ends) > 4)
    assert set(ends) == {(1, "no memory")}
    mark.touch()
    await optional.wait_ready()
    assert other.pid == untouched
    stop.set()
    assert await task is None


async def test_an_optional_one_with_wrong_flags_ends_all():
    refuser = child("import sys; print('error: no such flag'); sys.exit(2)")
    refuser.optional = True
    assert await asyncio.wait_for(run([child(HEALTHY), refuser]), 60) is refuser


async def test_why_a_draft_is_down_is_reported_until_it_is_back(tmp_path):
    mark, report = tmp_path / "mended", tmp_path / "report"
    broken = f"import os\nif not os.path.exists({str(mark)!r}): print('error: bad file', flush=True); os.abort()\n"
    draft = child(broken + HEALTHY, name="draft")
    draft.optional = True
    stop, watch = asyncio.Event(), DraftWatch(draft, report)
    task = asyncio.create_task(run([draft], stop, starting=watch.run()))
    await until(report.exists)
    assert report.read_text().startswith('the draft process ended with SIGABRT, after "bad file"; restarted after')
    mark.touch()
    await until(lambda: draft.ready)
    await until(lambda: not report.exists())
    os.kill(draft.pid, signal.SIGKILL)
    await until(report.exists)
    await until(lambda: not report.exists())
    stop.set()
    assert await task is None


async def test_a_child_that_ignores_sigterm_is_killed_after_grace(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    stubborn, gateway = child(STUBBORN), child(HEALTHY)
    start = time.monotonic()
    async with supervised(stubborn, gateway):
        pids = [stubborn.pid, gateway.pid]
        start = time.monotonic()
    assert 0.4 < time.monotonic() - start < 8
    assert all(gone(pid) for pid in pids)


async def test_the_last_child_is_ended_first():
    ends = []
    script = HEALTHY.replace("lambda *_: os._exit(0)", "lambda *_: (print('end', flush=True), os._exit(0))")
    first = child(script, on_line=lambda line: ends.append("first") if line == "end" else None)
    last = child(script, on_line=lambda line: ends.append("last") if line == "end" else None)
    async with supervised(first, last):
        pass
    assert ends == ["last", "first"]


@pytest.mark.parametrize("words", ["error: no such model", "outrider: error: no such model"])
async def test_the_reason_is_the_reported_error_in_spite_of_later_lines(monkeypatch, words):
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 2)
    noise = "E0000 00:00:00.000000 1 server.cc:1] shutdown"
    broken = child(f"print('loading\\n{words}\\n{noise}'); raise SystemExit(1)")
    assert await asyncio.wait_for(run([broken]), 60) is broken
    assert broken.reason == "no such model"


async def test_the_reason_is_that_of_the_last_run(monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 2)
    mark = str(tmp_path / "mark")
    second = f"sys.exit('killed') if os.path.exists({mark!r}) else os.mkdir({mark!r})"
    broken = child(f"import os, sys; {second}; sys.exit('error: one')")
    assert await asyncio.wait_for(run([broken]), 60) is broken
    assert broken.reason == "killed"


async def test_a_failing_start_display_is_not_swallowed():
    async def broken():
        raise ValueError("display")

    one = child(HEALTHY)
    with pytest.raises(ValueError, match="display"):
        await run([one], starting=broken())
    assert one.pid is None


async def test_lines_are_passed_on_whole():
    lines = []
    long = 200_000
    script = f"import sys; print('x' * {long}, flush=True); sys.stderr.write('ü\\r\\n\\nlast'); sys.exit(2)"
    await asyncio.wait_for(run([child(script, on_line=lines.append)]), 60)
    assert lines == ["x" * long, "ü", "last"]


async def test_a_line_that_cannot_be_written_is_the_only_one_lost():
    """For example on a full disk. The child would block once its pipe is full."""
    lines = []

    def full_at_first(line):
        lines.append(line)
        if len(lines) == 1:
            raise OSError("no space left on device")

    script = "import sys; print('\\n'.join(['first'] + ['x' * 1000] * 1000)); sys.exit(2)"
    await asyncio.wait_for(run([child(script, on_line=full_at_first)]), 60)
    assert lines == ["first"] + ["x" * 1000] * 1000


async def test_an_end_is_noticed_although_a_grandchild_holds_the_output(monkeypatch):
    monkeypatch.setattr(processes, "MAX_FAILED_STARTS", 2)
    lines = []
    # The second one lives until it is killed.
    script = "import os, subprocess; print(subprocess.Popen(['sleep', '3600']).pid, flush=True); os._exit(1)"
    broken = child(script, on_line=lines.append)
    try:
        assert await asyncio.wait_for(run([broken]), 60) is broken
        assert len(lines) == 2
        assert not any(map(gone, map(int, lines)))
    finally:
        for pid in map(int, lines):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def harness():
    running = []

    def start(*kinds):
        command = [sys.executable, "-m", "tests.support.outrider.children", *kinds]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(process)
        pids = [int(process.stdout.readline().split()[1]) for _ in kinds]
        return process, pids

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


def test_children_never_outlive_a_killed_supervisor(harness):
    process, pids = harness("HEALTHY", "STUBBORN")
    assert not any(map(gone, pids))
    process.kill()
    wait_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_cleanly(harness, number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever this run was started under
    try:
        process, pids = harness("HEALTHY", "HEALTHY")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(number)
    assert process.wait(60) == 0
    assert process.stdout.read().endswith("over\n")
    wait_gone(pids, 0.1)


def test_a_hangup_is_ignored_under_nohup(harness):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what processes inherit
    try:
        process, pids = harness("HEALTHY")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    assert process.poll() is None
    assert not any(map(gone, pids))


def test_a_second_signal_does_not_wait(harness):
    process, pids = harness("STUBBORN", "STUBBORN")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.wait(9) == 0
    assert time.monotonic() - start < 9  # their grace is longer
    wait_gone(pids, 0.1)
