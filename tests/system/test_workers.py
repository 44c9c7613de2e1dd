"""`outrider serve` with several gateway workers: real services behind one port, killed processes, graceful shutdown."""

import concurrent.futures
import contextlib
import os
import signal
import subprocess
import threading

import httpx
import pytest

from outrider.client import Client
from outrider.service_token import make_token_file
from tests.support.gateway.services import Gateway, until
from tests.support.system.serve import PROMPTS, System, processes_of
from tests.support.tiny import write_model, write_tokenizer

pytestmark = pytest.mark.system

WORKERS = 2
LONG = 400  # tokens of answers that are under way while something happens


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def sockets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sockets")
    return [f"unix:{folder}/{name}.sock" for name in ("target", "draft")]


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    path = tmp_path_factory.mktemp("token") / "token"
    make_token_file(path)
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory, sockets, token):
    """A gateway of one process for the same services."""
    target, draft = sockets
    made = Gateway(tmp_path_factory.mktemp("alone"), [target], [draft], service_token_file=token)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def system(folder, sockets, alone, token):
    target, draft = sockets
    flags = ["--gateway-workers", str(WORKERS), "--drain-timeout", "30", "--speculative-algorithm", "NGRAM"]
    system = System(folder, *flags, "--listen-target", target, "--listen-draft", draft,
                    "--service-token-file", token).wait()  # fmt: skip
    alone.wait()
    until(lambda: workers_up(system) == [1] * WORKERS, 60)
    yield system
    system.stop()


def workers_up(system):
    """Whether each worker is up, according to the worker that answers; empty if that worker ends meanwhile."""
    with contextlib.suppress(httpx.TransportError):
        return [figure(system, f'outrider_worker_up{{worker="{worker}"}}') for worker in range(WORKERS)]
    return []


def figure(system, sample):
    rows = (line.rsplit(" ", 1) for line in httpx.get(f"{system.url}/metrics").text.splitlines())
    return next((float(value) for name, value in rows if name == sample), 0.0)


def generated(system):
    """Tokens that each worker has sent to clients."""
    return [figure(system, f'outrider_generated_tokens_total{{worker="{worker}"}}') for worker in range(WORKERS)]


def complete(url, prompt, temperature=0.0, tokens=40):
    """Send a request over a new connection, which any worker may accept."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 7, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def gateway_processes(system):
    """The gateway's parent process, and its workers by number."""
    (parent,) = processes_of(system.process, "gateway")
    rows = subprocess.run(["ps", "--ppid", str(parent), "-o", "pid=,args="], capture_output=True, text=True).stdout
    found = {}
    for row in rows.splitlines():
        words = row.split()
        if "gateway.process.worker" in words:
            found[int(words[words.index("gateway.process.worker") + 1])] = int(words[0])
    return parent, found


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_two_workers_give_the_answers_of_one(system, alone):
    asked = [(prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 1.0)] * 2
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda one: complete(system.url, *one), asked))
    assert answers == [complete(alone.url, *one) for one in asked[: len(asked) // 2]] * 2
    assert min(generated(system)) > 0
    assert sum(generated(system)) == 40 * len(asked)


def test_both_answer_grpc(system, alone):
    before, text = generated(system), complete(alone.url, PROMPTS[0])

    def ask(_=None):
        with Client(f"127.0.0.1:{system.grpc_port}") as client:
            answers = client.complete(PROMPTS[0], max_tokens=40, temperature=0.0, ignore_eos=True)
        assert answers.text == text
        return all(now > then for now, then in zip(generated(system), before, strict=True))

    until(ask, 30)


def test_a_killed_worker_is_started_again(system, alone):
    parent, before = gateway_processes(system)
    assert sorted(before) == [0, 1]
    os.kill(before[1], signal.SIGKILL)
    until(lambda: workers_up(system) == [1, 0])
    assert complete(system.url, PROMPTS[0]) == complete(alone.url, PROMPTS[0])
    until(lambda: workers_up(system) == [1, 1], 60)
    again, after = gateway_processes(system)
    assert (again, after[0]) == (parent, before[0])
    assert after[1] != before[1]
    until(lambda: complete(system.url, PROMPTS[1]) == complete(alone.url, PROMPTS[1]) and generated(system)[1] > 0)


@pytest.mark.long
def test_workers_of_a_killed_parent_end_and_all_are_restarted(system, alone):
    parent, before = gateway_processes(system)
    os.kill(parent, signal.SIGKILL)
    until(lambda: all(map(gone, before.values())))
    until(lambda: workers_up(system) == [1, 1], 60)
    assert not set(gateway_processes(system)[1].values()) & set(before.values())
    assert complete(system.url, PROMPTS[0]) == complete(alone.url, PROMPTS[0])


def test_requests_in_progress_end_before_the_system(system, alone):
    """The last test, because it ends the system."""
    parent, workers = gateway_processes(system)
    prompts = PROMPTS[:4]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        whole = dict(
            zip(prompts, pool.map(lambda prompt: complete(alone.url, prompt, tokens=LONG), prompts), strict=True)
        )
    begun, answers = threading.Semaphore(0), {}

    def listen(prompt):
        stream = system.ask(prompt, stream=True, max_tokens=LONG)
        text = next(stream).choices[0].text
        begun.release()
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        answers[prompt] = (text + "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        listening = [pool.submit(listen, prompt) for prompt in prompts]
        assert all(begun.acquire(timeout=60) for _ in prompts)
        alone.process.terminate()  # so that it does not warn of services that are gone
        system.process.terminate()
        for task in listening:
            task.result()
    assert answers == {prompt: (text, "length") for prompt, text in whole.items()}
    assert system.process.wait(40) == 0
    assert all(map(gone, (parent, *workers.values())))
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{system.url}/health")
