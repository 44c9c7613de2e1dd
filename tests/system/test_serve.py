"""The whole system as a user starts it: `outrider serve`, three processes, the `openai` client, killed processes."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.support.gateway.services import Gateway
from tests.support.outrider.children import free_port
from tests.support.system.serve import PROMPTS, System, processes_of
from tests.support.system.services import target_service
from tests.support.tiny import write_model

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def plain_texts(folder, tmp_path_factory):
    """The model's texts from a target of another process without any draft, by temperature."""
    base = tmp_path_factory.mktemp("plain")
    target = target_service(folder, f"unix:{base}/target", self_speculation="off").start()
    gateway = Gateway(base, [target.address]).wait()

    def ask(prompt, temperature):
        return gateway.text(prompt, max_tokens=60, temperature=temperature, seed=7, ignore_eos=True)

    try:
        return {t: [ask(prompt, t) for prompt in PROMPTS] for t in (0.0, 1.0)}
    finally:
        assert gateway.stop() == 0
        target.stop()


@pytest.fixture(scope="module")
def system(folder, draft_folder, plain_texts):
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(draft_folder)]
    # An explicit tree and separate cores: draft tokens are verified although they might not be profitable here.
    flags += ["--speculative-num-steps", "4", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8"]
    cores = sorted(os.sched_getaffinity(0))
    flags += ["--cores-target", str(cores[0]), "--cores-draft", str(cores[-1])]
    system = System(folder, *flags).wait()
    yield system
    assert system.stop() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(system.process.pid, 0)


def believed(system, before, plain_texts, temperature):
    """Repeating the texts, more draft tokens are accepted than before within 90 seconds."""
    deadline = time.monotonic() + 90
    while system.metric("outrider_accepted_draft_tokens_total") == before and time.monotonic() < deadline:
        assert system.ask_all(temperature=temperature) == plain_texts[temperature]
    assert system.metric("outrider_accepted_draft_tokens_total") > before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(system, plain_texts, temperature):
    assert system.ask_all(temperature=temperature) == plain_texts[temperature]
    assert [system.ask(p, temperature=temperature) for p in PROMPTS[:3]] == plain_texts[temperature][:3]
    believed(system, 0, plain_texts, temperature)


def test_chat_streams_and_counts(system):
    stream = system.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": "hi"}], max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 20
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]


def test_draft_killed_midway_texts_go_on_and_speculation_returns(system, plain_texts):
    (draft,) = processes_of(system.process, "draft")
    stream = system.ask(PROMPTS[0], stream=True, max_tokens=250, temperature=1.0)
    text = next(stream).choices[0].text
    os.kill(draft, signal.SIGKILL)
    text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text.startswith(plain_texts[1.0][0])
    system.wait()
    assert processes_of(system.process, "draft") != [draft]
    believed(system, system.metric("outrider_accepted_draft_tokens_total"), plain_texts, 1.0)  # once it is warm again


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_target_killed_midway_streams_go_on_with_the_same_tokens(system, temperature):
    whole = system.ask(PROMPTS[2], max_tokens=250, temperature=temperature)
    (target,) = processes_of(system.process, "target")  # before the stream: it must not end while this looks
    stream = system.ask(PROMPTS[2], stream=True, max_tokens=250, temperature=temperature)
    text = next(stream).choices[0].text
    os.kill(target, signal.SIGKILL)
    text += "".join(chunk.choices[0].text for chunk in stream if chunk.choices)
    assert text == whole
    assert system.metric("outrider_reopened_sessions_total") > 0
    system.wait()


def test_gateway_killed_comes_back(system, plain_texts):
    (gateway,) = processes_of(system.process, "gateway")
    os.kill(gateway, signal.SIGKILL)
    time.sleep(0.5)
    system.wait()
    assert system.ask(PROMPTS[0]) == plain_texts[0.0][0]


# --- refused at start-up: one clear line, exit code 2 ---


def refused(*flags):
    ports = ["--port", free_port(), "--grpc-port", free_port(), "--max-running-requests", 4]
    command = map(str, [sys.executable, "-m", "outrider", "serve", *ports, *flags])
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_missing_weights_are_refused(draft_folder, tmp_path):
    (tmp_path / "config.json").write_text((draft_folder / "config.json").read_text())
    assert "weights" in refused("--model-path", tmp_path)
    assert "/nowhere" in refused("--model-path", "/nowhere")


def test_a_required_draft_that_is_not_there_is_refused(draft_folder):
    flags = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", "/nowhere", "--require-draft"]
    assert "/nowhere" in refused("--model-path", draft_folder, *flags)
    assert "--require-draft needs a drafter" in refused(
        "--model-path", draft_folder, "--speculative-algorithm", "NONE", "--require-draft"
    )


def test_a_required_draft_with_another_vocabulary_is_refused(draft_folder, tmp_path):
    draft = [
        "--require-draft",
        "--speculative-algorithm",
        "STANDALONE",
        "--speculative-draft-model-path",
        write_model(tmp_path, vocab=300),
    ]
    output = refused("--model-path", draft_folder, *draft)
    assert "vocab" in output
    assert "300" in output
    assert "320" in output


def test_a_port_in_use_is_refused(draft_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "in use" in refused("--model-path", draft_folder, "--port", taken.getsockname()[1])


def test_standalone_needs_a_model(draft_folder):
    assert "--speculative-draft-model-path" in refused(
        "--model-path", draft_folder, "--speculative-algorithm", "STANDALONE"
    )
