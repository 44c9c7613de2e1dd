"""The command `outrider`, as people and Docker call it."""

import asyncio
import contextlib
import importlib.util
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from bench.__main__ import main as bench_main
from bench.harness import report
from outrider import __version__, cli
from outrider.supervisor.health import is_healthy
from outrider.transport.rpc import GrpcServer
from tests.support.outrider.children import free_port


def outrider(*flags):
    return subprocess.run([sys.executable, "-m", "outrider", *flags], capture_output=True, text=True, timeout=60)


def test_help_names_every_verb():
    for flags in (["--help"], ["-h"], ["help"]):
        result = outrider(*flags)
        assert result.returncode == 0
        assert result.stderr == ""
    for verb in ("serve", "target", "draft", "gateway", "train", "bench", "ray", "doctor", "healthcheck"):
        assert f"\n  {verb} " in result.stdout
    assert outrider().returncode == 2
    assert outrider("--version").stdout == f"outrider {__version__}\n"


def test_serve_help_shows_most_used_flags_and_help_all_the_rest_by_topic():
    short, whole = (outrider("serve", flag).stdout for flag in ("--help", "--help-all"))
    for flag in ("--model-path", "--speculative-algorithm", "--speculative-draft-model-path", "--port", "--api-key"):
        assert flag in short
        assert flag in whole
    assert "--help-all" in short
    assert "--cores-target" in whole
    assert "--cores-target" not in short
    for title in ("model options", "speculation options", "scheduling options", "security options"):
        assert title in whole


def test_help_that_is_cut_short_ends_quietly():
    command = f"{sys.executable} -m outrider serve --help-all | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_wrong_configuration_is_one_line_and_code_2():
    result = outrider("serve", "--speculative-algorithm", "STANDALONE")
    assert result.returncode == 2
    assert result.stderr.startswith("outrider: error: ")
    assert result.stderr.count("\n") == 1
    assert outrider("sevre").returncode == 2
    assert outrider("serve", "--no-such-flag").returncode == 2


WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "{missing}" else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from outrider import cli
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("missing", "verb"), [("fastapi", "gateway"), ("torch", "target")])
def test_a_missing_extra_is_named(tmp_path, missing, verb):
    """Also a package that is imported late, as PyTorch and JAX are."""
    path = tmp_path / "socket"
    flags = ["--target", "unix:nowhere"] if verb == "gateway" else ["--listen", f"unix:{path}"]
    command = [sys.executable, "-c", WITHOUT.format(missing=missing), verb, *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2, result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"outrider: error: the {verb} needs {missing}, which is not installed; run `make install`, "
        f'or `pip install "outrider[{verb}]"`'
    )
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_a_verb_without_a_traceback(tmp_path):
    """Here Ctrl-C arrives while the verb waits for an answer."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = [sys.executable, "-m", "outrider", "healthcheck", f"127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen([*command, "-t", "3600"], stderr=subprocess.PIPE, text=True) as process:
            try:
                silent.settimeout(60)
                connection, _ = silent.accept()
                with connection:
                    process.send_signal(signal.SIGINT)
                    assert process.wait(60) == 130
                assert process.stderr.read() == ""
            finally:
                process.kill()


@pytest.mark.parametrize("name", ["services.target.x", "json.x"])
def test_a_missing_module_of_an_installed_package_is_no_missing_extra(monkeypatch, name):
    def main(flags):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(cli.importlib, "import_module", lambda _: types.SimpleNamespace(main=main))
    with pytest.raises(ModuleNotFoundError):
        cli.main(["target"])


def test_benchmarks_by_their_names(monkeypatch, tmp_path):
    """`outrider bench NAME` and `python -m bench NAME` are the same, also outside a checkout."""
    python = [sys.executable, "-m"]
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    monkeypatch.setenv("COLUMNS", "120")
    for flags in (["--help"], ["serve", "--help"], ["sevre"], ["serve", "--concurrency", "none"]):
        one, other = (
            subprocess.run([*python, *program, *flags], capture_output=True, text=True, timeout=60, cwd=tmp_path)
            for program in (["outrider", "bench"], ["bench"])
        )
        assert (one.returncode, one.stdout, one.stderr) == (other.returncode, other.stdout, other.stderr)
        assert one.returncode == (0 if "--help" in flags else 2)
    assert set(BENCHMARKS) >= {"serve", "system", "accept", "target", "draft"}
    for module, _ in BENCHMARKS.values():
        assert importlib.util.find_spec(module) is not None


def test_reports_are_written_to_the_chosen_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("bench.harness.report._folder", None)
    monkeypatch.setattr("sys.argv", ["outrider", "bench", "x", "--api-key", "s3cret", "--prompts", "a b.jsonl"])
    assert report.command() == "outrider bench x --api-key ... --prompts 'a b.jsonl'"
    assert report.results_folder() == Path(cli.__file__).parents[1] / "docs" / "benchmarks"
    monkeypatch.setattr("bench.harness.report._CHECKOUT", tmp_path / "site-packages")
    assert report.results_folder() == Path("benchmarks")

    def main(flags):
        made = report.Report("x", "A title")
        made.add(flags=" ".join(flags))
        made.write()

    module = types.SimpleNamespace(main=main)
    monkeypatch.setattr("bench.__main__.importlib.import_module", lambda name: module)
    assert bench_main(["target", "--output", str(tmp_path / "here"), "--quick"]) == 0
    assert "| --quick |" in (tmp_path / "here" / "x.md").read_text()
    assert bench_main(["nothing"]) == 2


@contextlib.asynccontextmanager
async def grpc_server(address):
    server = GrpcServer()
    await server.start(address, ["a.b.C"])
    try:
        yield server
    finally:
        await server.stop(0)


async def test_grpc_health(tmp_path):
    address = f"unix:{tmp_path}/health.sock"
    assert not await is_healthy(address, 0.5)
    async with grpc_server(address) as server:
        reported = []
        assert not await is_healthy(address, on_progress=reported.append)
        assert reported == []
        server.set_progress("compiling 3/9")
        assert not await is_healthy(address, on_progress=reported.append)
        assert reported == ["compiling 3/9"]
        await server.set_serving(True)
        assert await is_healthy(address)
        command = [sys.executable, "-m", "outrider", "healthcheck", address]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        assert await process.wait() == 0
        await server.set_serving(False)
        assert not await is_healthy(address)


async def test_http_health():
    status = "503 Service Unavailable"

    async def answer(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        line = status if request.startswith(b"GET /health/ready ") else "404 Not Found"
        writer.write(f"HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def grpc_instead(reader, writer):
        writer.write(b"\x00\x00\x18\x04")
        writer.close()

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    assert not await is_healthy(url)
    async with await asyncio.start_server(grpc_instead, "127.0.0.1", port):
        assert not await is_healthy(url)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        assert not await is_healthy(url)
        status = "200 OK"
        assert await is_healthy(url)
        assert await is_healthy(url + "/")


def test_healthcheck_of_an_unused_port_is_code_1(capsys):
    assert cli.main(["healthcheck", f"127.0.0.1:{free_port()}", "--timeout", "0.5"]) == 1
    assert "is not healthy" in capsys.readouterr().err


@pytest.mark.sampled(3)
@pytest.mark.parametrize("closed", [(0, 1, 2), (2,), (1,)])
@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--version"], 0),
        (["no-verb"], 2),
        (["gateway", "--target", "unix:nowhere", "--connect-timeout", "0.1"], 1),
    ],
)
def test_standard_streams_may_be_closed(flags, code, closed):
    if flags[0] == "gateway":
        flags = [*flags, "--port", str(free_port()), "--grpc-port", str(free_port())]
    script = f"import os, sys\nfor number in {closed}: os.close(number)\n"
    script += "os.execv(sys.executable, [sys.executable, '-m', 'outrider', *sys.argv[1:]])"
    assert subprocess.run([sys.executable, "-c", script, *flags], timeout=120).returncode == code
