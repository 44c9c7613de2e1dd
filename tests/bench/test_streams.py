"""The streaming path between fake engines: that it is measured, and what a profile of it says."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import uvloop

from bench.streams import pingpong
from bench.streams.clients import over_grpc
from bench.streams.profiling import shares
from bench.streams.run import main, measure, system
from outrider.errors import ConfigError


def test_a_relay_and_both_doors_of_the_gateway_are_measured(tmp_path):
    with system(str(tmp_path), engines_ms=5) as running:
        uvloop.run(over_grpc(running.grpc_port, 2, 10))  # before it is ready, a stream is refused
        figures = measure(running, sessions=4, steps=50)
    assert {name for name in figures if name.endswith("_ms")} == {"relay_ms", "grpc_ms", "sse_ms"}
    assert all(figures[name] >= 5 for name in ("relay_ms", "grpc_ms", "sse_ms"))
    assert figures["gateway_cpu_us_sse"] > 0


def test_samples_belong_to_the_innermost_part_that_is_known():
    raw = (
        "main (gateway/process/app.py:1);next (gateway/generation.py:3);split (outrider/wire/arrays.py:30) 3\n"
        "main (gateway/process/app.py:1);send (uvicorn/protocols/http/httptools_impl.py:50);write (asyncio/x.py:1) 5\n"
        "thread (1);run (threading.py:1) 2\n"
    )
    assert shares(raw) == [
        {"part": "uvicorn: HTTP and the clients' sockets", "share": "50%"},
        {"part": "gateway: frames of the services", "share": "30%"},
        {"part": "gRPC, its polling thread", "share": "20%"},
    ]


def test_a_profiler_that_is_missing_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("bench.streams.run.system", None)
    with pytest.raises(ConfigError, match="pip install py-spy"):
        main(["--profile"])


def test_the_echo_ends_in_peace_with_its_connection(tmp_path):
    with ThreadPoolExecutor() as pool:
        echo = pool.submit(pingpong.serve, str(tmp_path / "echo"))
        assert pingpong.measure_frames(str(tmp_path / "echo"), [16], rounds=3)[0] > 0
        assert echo.result(20) is None
