"""The benchmark of starts reads what processes report of themselves, and what the system counts for them."""

import os

import pytest

from bench.end_to_end import start
from bench.harness.report import Report
from outrider.process.startup import Startup


def report_of(*phases):
    began = Startup(0.0)
    for phase in phases:
        began.done(phase)
    return began.describe()


def test_phases_are_read_from_the_logs_of_all_processes():
    log = "\n".join([
        "10:00:00 target  INFO    ready on unix:/x",
        f"10:00:00 target  INFO    {report_of('Python and flags', 'reading weights', 'Python and flags')}",
        f"10:00:01 gateway INFO    {report_of('tokenizer and routes')}",
        "starting: target ready",
    ])  # fmt: skip
    found = start.phases_of(log)
    assert list(found) == ["target", "gateway"]
    assert list(found["target"].phases) == ["Python and flags", "reading weights"]
    assert sum(found["target"].phases.values()) == pytest.approx(found["target"].seconds, abs=0.02)
    assert found["target"].seconds > 0


def test_usage_is_that_of_the_process():
    one = start.ProcessStart()
    start.add_usage(one, os.getpid())
    assert one.read > 0
    assert one.peak >= one.proportional > 1e6
    absent = start.ProcessStart()
    start.add_usage(absent, 2**22 + 1)  # above the largest id
    assert absent == start.ProcessStart()


def test_the_median_start_is_shown_with_its_processes():
    def of(health):
        parts = {"serve": start.ProcessStart(health, 1.0, 10**6), "target": start.ProcessStart(1.0, 2.0, 3 * 10**6)}
        parts["target"].phases["reading weights"] = health
        return start.SystemStart(health - 1.0, health, parts)

    chosen = start.median_of([of(5.0), of(3.0), of(9.0)])
    assert chosen.health == 5.0
    report = Report("start", "Starts", columns=start.COLUMNS)
    start.add_rows(report, "cold", chosen)
    assert [(row["process"], row["ready_s"], row["cpu_s"], row["read_mb"]) for row in report.rows] == [
        ("all", 5.0, 3.0, 4.0), ("serve", 5.0, 1.0, 1.0), ("target", 1.0, 2.0, 3.0)
    ]  # fmt: skip
    rows = start.phase_rows({"cold": chosen, "warm": of(2.0)})
    assert rows == [{"process": "target", "phase": "reading weights", "cold": 5.0, "warm": 2.0}]
