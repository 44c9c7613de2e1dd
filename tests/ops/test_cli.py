"""The command, as people and Docker call it."""

import asyncio
import contextlib
import subprocess
import sys

import pytest

from outrider import __version__, cli
from outrider.serving.rpc import GrpcServer
from outrider.supervisor import doctor
from outrider.supervisor.health import is_healthy
from tests.ops.children import free_port


def outrider(*flags):
    return subprocess.run([sys.executable, "-m", "outrider", *flags], capture_output=True, text=True, timeout=60)


def test_help_names_every_verb():
    for flags in (["--help"], ["-h"], ["help"]):
        result = outrider(*flags)
        assert result.returncode == 0
        assert result.stderr == ""
    for verb in ("serve", "target", "draft", "gateway", "doctor", "healthcheck"):
        assert f"\n  {verb} " in result.stdout
    assert outrider().returncode == 2
    assert outrider("--version").stdout == f"outrider {__version__}\n"


def test_serve_help_groups_the_flags():
    shown = outrider("serve", "--help").stdout
    for flag in (
        "--model-path",
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--port",
        "--cores-target",
    ):
        assert flag in shown
    for title in ("shared options", "target options", "draft options", "gateway options"):
        assert title in shown


def test_help_that_is_cut_short_ends_quietly():
    command = f"{sys.executable} -m outrider serve --help | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stderr == ""


def test_wrong_configuration_is_one_line_and_code_2():
    result = outrider("serve", "--speculative-algorithm", "STANDALONE")
    assert result.returncode == 2
    assert result.stderr.startswith("outrider: error: ")
    assert result.stderr.count("\n") == 1
    assert outrider("sevre").returncode == 2
    assert outrider("serve", "--no-such-flag").returncode == 2


def test_a_missing_extra_is_named(monkeypatch, capsys):
    def fail(name):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    assert cli.main(["target"]) == 2
    assert 'needs torch, which is not installed; run `make install`, or `pip install "outrider[target]"`' in (
        capsys.readouterr().err
    )


def test_a_broken_module_of_our_own_is_no_missing_extra(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'services.target.x'", name="services.target.x")

    monkeypatch.setattr(cli.importlib, "import_module", fail)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["target"])


@contextlib.asynccontextmanager
async def grpc_server(address):
    server = GrpcServer()
    await server.start(address, ["a.b.C"])
    try:
        yield server
    finally:
        await server.stop(0)


async def test_grpc_health_is_asked(tmp_path):
    address = f"unix:{tmp_path}/health.sock"
    assert not await is_healthy(address, 0.5)
    async with grpc_server(address) as server:
        told = []
        assert not await is_healthy(address, tell=told.append)
        assert told == []
        server.tell("compiling 3/9")
        assert not await is_healthy(address, tell=told.append)
        assert told == ["compiling 3/9"]
        await server.set_serving(True)
        assert await is_healthy(address)
        command = [sys.executable, "-m", "outrider", "healthcheck", address]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        assert await process.wait() == 0
        await server.set_serving(False)
        assert not await is_healthy(address)


async def test_http_health_is_asked():
    status = "503 Service Unavailable"

    async def answer(reader, writer):
        request = await reader.readuntil(b"\r\n\r\n")
        line = status if request.startswith(b"GET /health ") else "404 Not Found"
        writer.write(f"HTTP/1.1 {line}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    assert not await is_healthy(url)
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        assert not await is_healthy(url)
        status = "200 OK"
        assert await is_healthy(url)
        assert await is_healthy(url + "/")


def test_healthcheck_of_nothing_is_code_1(capsys):
    assert cli.main(["healthcheck", f"127.0.0.1:{free_port()}", "--timeout", "0.5"]) == 1
    assert "is not healthy" in capsys.readouterr().err


def test_doctor_reports_devices_cores_and_the_model(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(doctor, "_DEVICES", {"numpy": "print('one', 'abacus')", "json": "import nothing_of_that_name"})
    assert cli.main(["doctor"]) == 0
    facts = dict(line.split(None, 1) if line[0] != " " else ("", "") for line in capsys.readouterr().out.splitlines())
    assert __version__ in facts["outrider"]
    assert "devices" in facts["numpy"]
    assert "one abacus" in facts["numpy"]
    assert "ModuleNotFoundError" in facts["json"]
    assert str(tmp_path) in facts["cache"]
    assert facts["converted"] == "nothing yet"
