"""The processes of ranks: an end that is clean, or reported, on one machine and on several; and what is refused."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from outrider.config import TargetConfig
from outrider.config.ranks import check_ranks, rank_places
from outrider.errors import ConfigError
from services.target.model.loading import quantized, shards
from services.target.model.loading.support import read_settings
from services.target.process.ranks import group, machines
from services.target.process.ranks.machines import MachineWatch
from tests.support.checkpoints.families import write_family


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Starts the service's processes with further flags; all are killed in the end."""
    folder = write_family(tmp_path / "model", "llama-2")
    started = []

    def start(*flags, until="ready on"):
        command = [sys.executable, "-m", "services.target", "--model-path", str(folder), "--tp-size", "2", "--device",
                   "cpu", "--max-total-tokens", "2048", "--listen", f"127.0.0.1:{free_port()}", *flags]  # fmt: skip
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        lines, ready = [], threading.Event()

        def read():
            for line in process.stderr:
                lines.append(line)
                if until in line:
                    ready.set()
            ready.set()

        reader = threading.Thread(target=read)
        reader.start()

        def end():
            process.wait(30)
            reader.join(10)
            return "".join(lines)

        def wait():
            assert ready.wait(120)
            assert process.poll() is None, "".join(lines)

        started.append((process, reader))
        return SimpleNamespace(process=process, end=end, wait=wait)

    yield start
    for process, reader in started:
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


@pytest.mark.long
def test_a_service_on_two_machines_stops_cleanly(start):
    """Two nodes without a network: machine 1 starts first and waits for machine 0."""
    meeting = ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
    further = start(*meeting, "--node-rank", "1", until="machine 1 of 2 computes ranks 1")
    first = start(*meeting, "--node-rank", "0")
    further.wait()
    first.wait()
    assert not followers_of(first.process)
    (follower,) = followers_of(further.process)
    first.process.send_signal(signal.SIGTERM)
    for target in (first, further):
        results = target.end()
        assert target.process.returncode == 0, results
        assert "rror" not in results
    wait_until_gone(follower)


def test_the_service_ends_with_a_rank(start):
    target = start()
    target.wait()
    (follower,) = followers_of(target.process)
    os.kill(follower, signal.SIGKILL)
    results = target.end()
    assert target.process.returncode == 1
    assert "rank 1 of 2 was killed by signal 9; the target cannot go on without it" in results


def test_a_machine_that_falls_silent_is_noticed_by_both_sides(monkeypatch):
    monkeypatch.setattr(machines, "_BEAT_SECONDS", 0.02)
    gone = {0: [], 1: []}
    store = dist.TCPStore(group.HOST, 0, is_master=True, wait_for_workers=False)
    watches = {
        number: MachineWatch(
            f"{group.HOST}:{store.port}", TargetConfig(tp_size=2, nnodes=2, node_rank=number, dist_init_addr="a:1"),
            gone[number].append, silent=0.5,
        )
        for number in (0, 1)
    }  # fmt: skip
    time.sleep(0.8)
    assert gone == {0: [], 1: []}
    watches[1].stop()
    deadline = time.monotonic() + 10
    while not gone[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert gone == {0: ["machine 1 of 2 does not answer; the target cannot go on without it"], 1: []}


def test_machines_with_other_flags_or_weights_are_refused():
    mine = {"--dtype": "float32", "weights of the fingerprint": "ab"}
    for name, other in (("--dtype", "bfloat16"), ("weights of the fingerprint", "cd")):
        with pytest.raises(ConfigError, match=f"rank 3 has {name} {mine[name]}, rank 0 has {other}"):
            group._check_same(mine | {name: other}, mine, 3)


TWO = {"tp_size": 2}
NODES = {"tp_size": 4, "nnodes": 2, "dist_init_addr": "10.0.0.1:5000"}


@pytest.mark.parametrize(("flags", "ranks", "devices"), [
    (TWO, [0, 1], ("auto", "auto")),
    (TWO | {"device": "cuda"}, [0, 1], ("cuda:0", "cuda:1")),
    (TWO | {"device": "cuda:2"}, [0, 1], ("cuda:2", "cuda:3")),
    (TWO | {"device": "cuda:3,cuda:1"}, [0, 1], ("cuda:3", "cuda:1")),
    (NODES | {"node_rank": 1, "device": "cuda:5,cuda:7"}, [2, 3], ("cuda:5", "cuda:7")),
    ({"device": "cuda:4"}, [0], ("cuda:4",)),
])  # fmt: skip
def test_ranks_have_their_places(flags, ranks, devices):
    places = rank_places(TargetConfig(**flags))
    assert (list(places.here), places.devices) == (ranks, devices)


@pytest.mark.parametrize(("flags", "results"), [
    ({"tp_size": 0}, "--tp-size must be 1 or more, not 0"),
    ({"tp_size": 3, "nnodes": 2}, "--nnodes 2 must divide --tp-size 3"),
    (NODES | {"node_rank": 2}, r"--node-rank must lie in \[0, 1\] with --nnodes 2, not 2"),
    (NODES | {"dist_init_addr": None}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
    (TWO | {"dist_init_addr": "a:1"}, "--dist-init-addr is for several machines"),
    (TWO | {"device": "cuda:1,cuda:2,cuda:3"}, "names 3 devices for 2 ranks"),
    (TWO | {"device": "cuda:1,cpu"}, "a list names CUDA devices, such as cuda:2,cuda:3"),
    (TWO | {"device": "cuda:1,cuda:1"}, "names a device twice"),
    (TWO | {"deterministic": True}, "--deterministic does not go with --tp-size 2"),
    (TWO | {"self_speculation": "head"}, "--self-speculation head and --tp-size 2"),
])  # fmt: skip
def test_flags_that_do_not_fit_together_are_refused(flags, results):
    with pytest.raises(ConfigError, match=results):
        check_ranks(TargetConfig(**flags))
    with pytest.raises(ConfigError, match=results):
        TargetConfig(**flags).check()  # the check of the dry run


@pytest.mark.parametrize(("family", "flags", "results"), [
    ("llama-2", {"tp_size": 3}, r"--tp-size 3 does not divide the model's 4 attention heads"),
    ("qwen2.5", {"tp_size": 4}, r"--tp-size 4 does not divide the model's 2 key-value heads"),
    ("olmo-2", {"tp_size": 2, "device": "cuda"}, r"there is no device cuda:0; PyTorch sees 0 CUDA devices"),
])  # fmt: skip
def test_models_that_cannot_be_divided_are_refused(family, flags, results, tmp_path):
    folder = write_family(tmp_path / "model", family)
    config = TargetConfig(model_path=str(folder), **({"device": "cpu"} | flags))

    def check():
        shards.check_devices(rank_places(config).devices)
        shards.split(folder, read_settings(folder, trust_remote_code=False)[0], config.tp_size)

    with pytest.raises(ConfigError, match=results):
        check()


def test_models_without_a_plan_are_refused(tmp_path):
    text = SimpleNamespace(base_model_tp_plan=None, model_type="cathedral")
    text.get_text_config = lambda: text
    with pytest.raises(ConfigError, match="no plan to split a cathedral"):
        shards.split(tmp_path, text, 2)


class Text(SimpleNamespace):
    def get_text_config(self):
        return self


def stored(**quantization):
    return Text(
        intermediate_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=128, moe_intermediate_size=None,
        quantization_config=quantization,
    )  # fmt: skip


@pytest.mark.parametrize(("method", "ranks", "kept"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 2, True),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, False),  # half a block of keys
    ({"quant_method": "fp8"}, 8, True),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 2, False),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 1, True),
])  # fmt: skip
def test_fp8_stays_packed_where_blocks_are_whole(method, ranks, kept, monkeypatch):
    """On CUDA with the packages of the formats."""
    import torch

    monkeypatch.setattr(quantized, "_kept", lambda *_: True)
    settings = stored(**method)
    how = quantized.prepare(settings, torch.device("cuda"), ranks)
    assert ("device_map" in how) == (ranks == 1)
    assert (settings.quantization_config["quant_method"] == "outrider") != kept


def test_formats_of_other_libraries_are_not_divided():
    import torch

    with pytest.raises(ConfigError, match="quantized by torchao cannot be divided among ranks; leave out --tp-size"):
        quantized.prepare(stored(quant_method="torchao"), torch.device("cuda"), 2)
