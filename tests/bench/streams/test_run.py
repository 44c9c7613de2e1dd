"""Overhead of the gateway between simulated engines."""

import pytest
import uvloop

from bench.streams.checks import seconds_of_checks
from bench.streams.clients import over_grpc
from bench.streams.run import main, measure, system
from outrider.errors import ConfigError

TIMES = {"relay_ms", "relay_socket_ms", "grpc_ms", "sse_ms"}


@pytest.mark.long
def test_relays_and_both_listeners_are_measured(tmp_path):
    with system(str(tmp_path), engines_ms=5) as running:
        uvloop.run(over_grpc(running.grpc_port, 2, 10))  # the gateway rejects streams until it is ready
        figures = measure(running, sessions=4, steps=50)
    assert {name for name in figures if name.endswith("_ms")} == TIMES
    assert all(figures[name] >= 5 for name in TIMES)
    assert figures["gateway_cpu_us_sse"] > 0


def test_checks_of_messages_are_timed():
    few, many = seconds_of_checks(1), seconds_of_checks(64)
    assert 0 < few < many < 1e-3


def test_a_missing_profiler_is_reported_first(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("bench.streams.run.system", None)
    with pytest.raises(ConfigError, match="pip install py-spy"):
        main(["--profile"])
