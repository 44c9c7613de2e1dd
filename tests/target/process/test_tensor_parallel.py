"""Tensor parallelism on two ranks of the CPU: the same text as on one, and an end that is clean or results clearly."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.engine.engine import TargetEngine
from services.target.model.loading import shards
from services.target.model.loading.support import read_settings
from services.target.process.tensor_parallel import load_split, pack, unpack
from services.target.step.batch import Batch, Rows
from services.target.step.layout import Layout
from tests.support.checkpoints.families import write_family
from tests.support.target.driving import opening, run
from tests.support.target.greedy_text import CHUNKS, NEW, PROMPT, greedy, proposals_near

SPLIT = {"device": "cpu", "dtype": "float32", "tp_size": 2}


@pytest.fixture
def start(tmp_path):
    """Starts two ranks on a folder; gives the model and the processes of the others."""
    started = []

    def start(folder, **flags):
        deaths = []
        model, workers = load_split(folder, TargetConfig(model_path=str(folder), **(SPLIT | flags)), deaths.append)
        started.append(workers)
        return SimpleNamespace(model=model, workers=workers, deaths=deaths)

    yield start
    for workers in started:
        workers.stop()


@pytest.mark.parametrize("family", ["gemma-3", "qwen3-moe"])
def test_the_text_is_that_of_one_rank(family, tmp_path, start):
    changes = {"num_key_value_heads": 2}
    folder = write_family(tmp_path / "model", family, **changes)
    expected = greedy(folder)
    ranks = start(folder)
    assert {shape.kv_heads for shape in ranks.model.shapes} == {1}  # of two
    for page_size, chunk in CHUNKS.items():
        config = TargetConfig(page_size=page_size, chunked_prefill_size=chunk, max_running_requests=4,
                              max_total_tokens=4096, speculative_num_draft_tokens=10)  # fmt: skip
        engine = TargetEngine(ranks.model, config)
        sessions = [opening(1, PROMPT, max_tokens=NEW), opening(2, PROMPT[::-1], max_tokens=NEW)]
        result = run(engine, sessions, proposals_near(expected, page_size))
        assert result.new[1] == expected
        assert 0 < result.accepted < result.verified
    ranks.workers.stop()
    assert [process.returncode for process in ranks.workers.processes] == [0]
    assert not ranks.deaths


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def target(tmp_path):
    """The service in a process of its own, on two ranks; stopped in the end."""
    folder = write_family(tmp_path / "model", "llama-2")
    flags = ["--tp-size", "2", "--device", "cpu", "--listen", f"127.0.0.1:{free_port()}", "--max-total-tokens", "2048"]
    command = [sys.executable, "-m", "services.target", "--model-path", str(folder), *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    ready = threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "ready on" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert ready.wait(120)
    assert process.poll() is None, "".join(lines)

    def end():
        process.wait(30)
        reader.join(10)
        return "".join(lines)

    yield SimpleNamespace(process=process, end=end)
    process.kill()
    process.wait()
    reader.join()
    process.stderr.close()


def followers_of(process):
    found = []
    for task in os.listdir(f"/proc/{process.pid}/task"):
        with open(f"/proc/{process.pid}/task/{task}/children") as file:
            found += [int(child) for child in file.read().split()]
    return found


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().split()[2] == "Z"


def wait_until_gone(pid):
    deadline = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_service_stops_cleanly(target):
    (follower,) = followers_of(target.process)
    target.process.send_signal(signal.SIGTERM)
    results = target.end()
    assert target.process.returncode == 0, results
    assert "rror" not in results
    wait_until_gone(follower)


def test_the_service_ends_with_a_rank(target):
    (follower,) = followers_of(target.process)
    os.kill(follower, signal.SIGKILL)
    results = target.end()
    assert target.process.returncode == 1
    assert "rank 1 of 2 was killed by signal 9; the target cannot go on without it" in results


def test_batches_are_broadcast_completely():
    rng = np.random.default_rng(0)
    starts, committed, parents = [0, 37, 16], [5, 1, 3], [[], [-1, 0, 0, -1], [-1]]
    nodes = list(map(len, parents))
    keys = np.array(starts) + committed + nodes
    pages = rng.integers(1, 99, int((-(-keys // 16)).sum())).astype(np.int32)
    layout = Layout.of(starts, committed, nodes, pages, np.concatenate(parents).astype(np.int32), 16)
    rows = int(layout.first[-1])
    flat = Rows(*rng.integers(0, 9, (2, rows)), np.array([4, 5, 6]))
    batch = Batch(layout, flat, torch.device("cpu"), 2)
    twin = unpack(np.concatenate(pack(batch)).astype(np.int64), torch.device("cpu"))
    assert (twin.drawn, len(twin.spans)) == (2, 3)
    assert np.array_equal(twin.layout.slots, layout.slots)
    for name in ("ids", "positions", "sampled"):
        assert np.array_equal(getattr(twin.rows, name), getattr(flat, name))
    for mine, its in zip(batch.spans, twin.spans, strict=True):
        for name in ("first", "rows", "start", "committed", "page_size"):
            assert getattr(mine, name) == getattr(its, name)
        for name in ("pages", "positions", "parents", "slots", "tree_mask"):
            assert np.array_equal(getattr(mine, name), getattr(its, name))


@pytest.mark.parametrize(("family", "flags", "results"), [
    ("llama-2", {"tp_size": 3}, r"--tp-size 3 does not divide the model's 4 attention heads"),
    ("qwen2.5", {"tp_size": 4}, r"--tp-size 4 does not divide the model's 2 key-value heads"),
    ("cohere-2", {"tp_size": 0}, r"--tp-size must be 1 or more"),
    ("olmo-2", {"device": "cuda"}, r"--tp-size 2: PyTorch sees 0 CUDA devices"),
    ("olmo-2", {"device": "cuda:1"}, r"--tp-size 2 takes the first 2 devices; write --device cuda"),
])  # fmt: skip
def test_models_that_cannot_be_sharded_are_rejected(family, flags, results, tmp_path):
    folder = write_family(tmp_path / "model", family)
    config = TargetConfig(model_path=str(folder), **(SPLIT | flags))

    def check():
        shards.check_devices(config.tp_size, config.device)
        shards.split(folder, read_settings(folder, trust_remote_code=False)[0], config.tp_size)

    with pytest.raises(ConfigError, match=results):
        check()


def test_models_without_a_plan_and_quantized_ones_are_refused(tmp_path):
    text = SimpleNamespace(base_model_tp_plan=None, model_type="cathedral")
    text.get_text_config = lambda: text
    with pytest.raises(ConfigError, match="no plan to split a cathedral"):
        shards.split(tmp_path, text, 2)
    text.base_model_tp_plan = {"layers.*.self_attn.q_proj": "colwise"}
    text.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(ConfigError, match="quantized checkpoints cannot be split"):
        shards.split(tmp_path, text, 2)
