"""A draft that cannot be loaded keeps answering why, and serves once it can be loaded."""

import contextlib
import json
import logging
import signal
import subprocess
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.process.backoff import Backoff
from outrider.wire.v1 import draft_pb2, draft_pb2_grpc
from services.draft.process import app, attempts
from services.draft.process.attempts import load_with_retries, reason_of
from tests.support.checkpoints.heads import write_pair
from tests.support.tiny import write_model, write_tokenizer


@pytest.mark.long
def test_attempts_go_on_with_growing_waits_until_one_succeeds(monkeypatch, caplog):
    monkeypatch.setattr(attempts, "BACKOFF", Backoff(first=1.0, longest=4.0))
    failures = [ConfigError("there is no folder /x"), ConfigError("there is no folder /x"), ValueError("odd\nfile")] * 2
    waits, reported = [], []

    def load():
        if failures:
            raise failures.pop(0)
        return "loaded"

    with caplog.at_level(logging.INFO):
        assert load_with_retries(load, reported.append, waits.append) == "loaded"
    assert waits == [1, 2, 4, 4, 4, 4]
    assert reported == ["there is no folder /x", "there is no folder /x", "ValueError: odd file"] * 2
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4  # a reason that repeats is logged once
    assert "there is no folder /x" in lines[0]
    assert "--require-draft" in lines[0]


def test_waits_vary_so_that_services_do_not_retry_together():
    waits = Backoff(first=1.0, longest=1.0, jitter=0.2).waits()
    seen = [next(waits) for _ in range(50)]
    assert len(set(seen)) > 10
    assert 0.8 <= min(seen) <= max(seen) <= 1.2


def test_a_library_that_is_not_installed_is_named():
    assert reason_of(ModuleNotFoundError("No module named 'jax'", name="jax")).startswith("jax is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model")))


def copy(model, folder):
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def weights_gone(folder):
    (folder / "model.safetensors").unlink()


def weights_cut(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def weights_of_noise(folder):
    (folder / "model.safetensors").write_bytes(b"\xff" * 4096)


def other_architecture(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))


def config_cut(folder):
    (folder / "config.json").write_text("{")


def other_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 64}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (weights_gone, "has no weights"),
        (weights_cut, "model.safetensors"),
        (weights_of_noise, "model.safetensors"),
        (other_architecture, "MambaForCausalLM"),
        (config_cut, "no valid JSON"),
        (other_sizes, "shape"),
    ],
)
def test_a_damaged_checkpoint_is_reported(model, tmp_path, damage, words):
    folder = copy(model, tmp_path / "draft")
    damage(folder)
    assert words in failure(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(folder))


def test_a_draft_on_the_hub_that_cannot_be_fetched_is_reported(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    reason = failure(speculative_algorithm="STANDALONE", speculative_draft_model_path="nowhere/no-such-model")
    assert "cannot get nowhere/no-such-model from the Hugging Face hub" in reason


def test_a_head_whose_target_cannot_be_read_is_reported(tmp_path):
    _, head, _ = write_pair(tmp_path, "EAGLE3")
    reason = failure(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(head), model_path=f"{tmp_path}/gone"
    )
    assert f"there is no folder {tmp_path}/gone" in reason


class Loaded(Exception):
    """The draft was loaded after all."""


def failure(**flags):
    """The reported reason of the first failed attempt."""

    def once(_):
        raise Loaded

    reasons = []
    config = DraftConfig(**flags, max_running_requests=1, draft_max_total_tokens=2048)
    with pytest.raises(Loaded):
        load_with_retries(lambda: app.build(config), reasons.append, once)
    return reasons[0]


@contextlib.contextmanager
def process(address, *flags):
    running = subprocess.Popen([sys.executable, "-m", "services.draft", "--listen", address, *map(str, flags)])
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(60)
            yield running, channel
    finally:
        running.kill()
        running.wait(20)


def test_the_process_answers_why_and_serves_once_the_folder_is_there(model, tmp_path):
    folder = tmp_path / "later"
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", folder)
    with process(f"unix:{tmp_path}/draft.sock", *flags, "--draft-max-total-tokens", 2048) as (running, channel):
        stub, health = draft_pb2_grpc.DraftServiceStub(channel), health_pb2_grpc.HealthStub(channel)

        def info():
            try:
                return stub.GetDraftInfo(draft_pb2.GetDraftInfoRequest(), timeout=10)
            except grpc.RpcError as error:
                return error

        def is_serving():
            answer, call = health.Check.with_call(health_pb2.HealthCheckRequest(), timeout=10)
            return answer.status == health_pb2.HealthCheckResponse.SERVING, dict(call.trailing_metadata())

        deadline = time.monotonic() + 60
        while (error := info()).code() is not grpc.StatusCode.FAILED_PRECONDITION:
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert error.details().startswith(f"the draft cannot be loaded: there is no folder {folder}; name a folder")
        serving, metadata = is_serving()
        assert not serving
        assert "there is no folder" in metadata["outrider-progress"]
        copy(model, tmp_path / "partial").rename(folder)
        while not is_serving()[0]:
            assert time.monotonic() < deadline + 60
            time.sleep(0.1)
        assert list(info().drafters) == ["STANDALONE"]
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0


def test_a_process_that_cannot_load_ends_at_a_signal(tmp_path):
    flags = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", tmp_path / "none")
    with process(f"unix:{tmp_path}/draft.sock", *flags) as (running, _):
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) == 0
