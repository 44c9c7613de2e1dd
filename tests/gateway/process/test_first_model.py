"""A gateway with a file of models before any of them is served: the file may be read again, or none may come."""

import signal
import time
from pathlib import Path

import pytest

from tests.support.gateway.services import Gateway, Service, Target, answers, free_port, refused, until


def handles(pid, number):
    """True if a process ignores or handles a signal."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    return bool((int(lines["SigIgn"], 16) | int(lines["SigCgt"], 16)) >> (number - 1) & 1)


def serves(gateway, names):
    until(lambda: answers(gateway, "/health/ready") == 200, seconds=60)
    assert [one["id"] for one in gateway.client.get("/v1/models").json()["data"]] == names
    answer = gateway.client.post("/v1/completions", json={"prompt": "A", "temperature": 0, "max_tokens": 3})
    assert (answer.status_code, answer.json()["model"]) == (200, names[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("absent", ["[a]\n", '[a]\n[b]\ntarget = "unix:/none/target"\n', '[a]\ntarget = "{0}"\n'])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_file_is_read_again_before_a_first_model_is_served(folder, target, workers, absent):
    file = folder / "models.toml"
    file.write_text(absent.format(f"127.0.0.1:{free_port()}"))
    gateway = Gateway(folder, None, models=file, gateway_workers=workers)
    try:
        until(lambda: answers(gateway, "/health/ready") == 503, seconds=60)
        file.write_text("[a")
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: "the models stay as they were" in gateway.log.read_text())
        file.write_text(f'[c]\n[d]\ntarget = "{target.address}"\n[a]\n')
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: answers(gateway, "/health/ready") == 200, seconds=60)
        file.write_text(f'[d]\ntarget = "{target.address}"\n')
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: gateway.client.get("/v1/models").json()["data"][0]["id"] == "d")
        serves(gateway, ["d"])
    finally:
        assert gateway.stop() == 0


def test_a_change_of_the_file_while_the_process_starts_counts(folder, target):
    """The signal ends no process that does not read the file yet; what reads it later needs none."""
    file = folder / "models.toml"
    file.write_text(f'[d]\ntarget = "{target.address}"\n')
    gateway = Gateway(folder, None, models=file, gateway_workers=2)
    try:
        end = time.monotonic() + 60
        while answers(gateway, "/health/ready") != 200:
            assert time.monotonic() < end, gateway.log.read_text()
            if handles(gateway.process.pid, signal.SIGHUP):
                gateway.process.send_signal(signal.SIGHUP)
            time.sleep(0.02)
        serves(gateway, ["d"])
        assert "restarting" not in gateway.log.read_text()
    finally:
        assert gateway.stop() == 0


def test_models_that_do_not_come_end_the_gateway_also_after_a_change(folder, tmp_path):
    file = tmp_path / "models.toml"
    file.write_text('[a]\ntarget = "unix:/none/1"\n[b]\ntarget = "unix:/none/2"\n')
    assert "no target of any model answered in 1 s" in refused("--models", file, "--connect-timeout", 1, code=1)
    file.write_text("[a]\n")  # may get targets by the API
    gateway = Gateway(folder, None, models=file, connect_timeout=1)
    try:
        until(lambda: answers(gateway, "/health/ready") == 503, seconds=60)
        time.sleep(1.5)
        assert gateway.process.poll() is None
        file.write_text('[b]\ntarget = "unix:/none/2"\n')
        gateway.process.send_signal(signal.SIGHUP)
        assert gateway.process.wait(30) == 1
        assert "no target of any model answered in 1 s" in gateway.log.read_text()
    finally:
        gateway.client.close()
        gateway.process.kill()
        gateway.process.wait(30)


def test_a_target_that_comes_to_a_changed_table_is_served(folder):
    file = folder / "late.toml"
    file.write_text("[a]\n")
    late = Service(Target, f"unix:{folder}/late")
    gateway = Gateway(folder, None, models=file)
    try:
        until(lambda: answers(gateway, "/health/ready") == 503, seconds=60)
        file.write_text(f'[a]\ntarget = "{late.address}"\n')
        gateway.process.send_signal(signal.SIGHUP)
        until(lambda: "was read again" in gateway.log.read_text())
        late.start()
        serves(gateway, ["a"])
    finally:
        assert gateway.stop() == 0
        late.stop()
