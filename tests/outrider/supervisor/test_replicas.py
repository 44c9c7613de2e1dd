"""Replicas of the services: which devices, cores, memory and addresses each of them has."""

import os
from pathlib import Path

import pytest

from outrider import cli
from outrider.config import ServeConfig, read_flags
from outrider.errors import ConfigError
from outrider.placement import devices
from outrider.placement.cores import share_cores
from outrider.placement.memory import GIB
from outrider.supervisor import memory, replicas
from outrider.supervisor.app import make_children
from outrider.supervisor.display import Display
from outrider.supervisor.dry_run import make_plan
from tests.support.checkpoints.headers import write_qwen
from tests.support.gpu_machine import H100, put_gpus, take_gpus
from tests.support.tiny import write_model

STANDALONE = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model", "some/draft")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("models") / "model", 1024, 3072, 28, 16)


def plan(*flags):
    config, notes = read_flags(ServeConfig, ["--model", "some/model", *STANDALONE, *flags], "outrider serve")
    return make_plan(config, notes)


def used(made):
    return [one.device for one in made.targets], [one.draft_device for one in made.drafts]


@pytest.mark.parametrize(
    ("cards", "flags", "targets", "drafts"),
    [
        # flags name all devices
        (3, "--target-replicas 2 --target-devices cuda:0,cuda:1 --draft-devices cuda:2", "cuda:0 cuda:1", "cuda:2"),
        (4, "--target-replicas 2 --tp-size 2 --target-devices cuda:3,cuda:2,cuda:1,cuda:0",
         "cuda:3,cuda:2 cuda:1,cuda:0",
         "auto"),
        (4, "--target-replicas 2 --target-devices cuda:1", "cuda:1 cuda:2", "cuda:0"),
        (1, "--target-replicas 2 --target-devices cuda:0,cuda:0", "cuda:0 cuda:0", "auto"),
        (4, "--draft-replicas 2 --draft-tp-size 2 --draft-devices cuda:0,cuda:2,cuda:1,cuda:3", "auto",
         "cuda:0,cuda:2 cuda:1,cuda:3"),
        (0, "--target-replicas 2 --device cpu --draft-replicas 2 --draft-device cpu", "cpu cpu", "cpu cpu"),
        # the machine's, spread over the replicas
        (4, "--dp-size 2", "cuda:0 cuda:1", "cuda:2"),
        (4, "--data-parallel-size 2 --draft-replicas 2", "cuda:0 cuda:1", "cuda:2 cuda:3"),
        (4, "--sglang-dp-size 3 --draft-replicas 2", "cuda:0 cuda:1 cuda:2", "cuda:3 cuda:3"),
        (8, "--target-replicas 2 --tp-size 3 --draft-tp-size 2", "cuda:0,cuda:1,cuda:2 cuda:3,cuda:4,cuda:5",
         "cuda:6,cuda:7"),
        (2, "--target-replicas 2 --draft-replicas 3", "cuda:0 cuda:1", "cuda:0 cuda:1 cuda:0"),
        (2, "--device cpu --draft-replicas 2", "cpu", "cuda:0 cuda:1"),
        (0, "--target-replicas 2 --draft-replicas 2", "auto auto", "auto auto"),
        # counts that do not fit
        (3, "--target-replicas 2 --tp-size 2",
         "--target-replicas 2 with --tp-size 2 needs 4 devices, and this machine has 3",
         None),
        (2, "--target-replicas 2 --device cuda:1", "needs 2 devices from cuda:1 on, and this machine has 2", None),
        (4, "--target-replicas 2 --target-devices cuda:0,cuda:1,cuda:2",
         "needs 2 devices, and --target-devices .* names 3",
         None),
        (4, "--draft-replicas 3 --draft-devices cuda:0,cuda:1",
         "--draft-replicas 3 with --draft-tp-size 1 needs 3 devices",
         None),
        (4, "--target-replicas 2 --tp-size 2 --target-devices cuda:0,cuda:0,cuda:1,cuda:2",
         "each of its 2 ranks", None),
        (4, "--target-replicas 2 --target-devices cuda:x", "no number behind the colon", None),
        (0, "--target-replicas 2 --target-devices cpu,foo", "'foo' is no device; write for example cpu", None),
        (0, "--draft-replicas 2 --draft-devices , --speculative-algorithm STANDALONE --speculative-draft-model m",
         "'' is no device", None),
        (4, "--draft-tp-size 2 --draft-device cuda:0,cuda:1,cuda:2", "names 3 devices for --draft-tp-size 2", None),
        (4, "--draft-tp-size 2 --draft-device cuda:1,cuda:1", "names a device twice", None),
        (0, "--target-replicas 0", "must be 1 or more, not 0", None),
        (0, "--draft-replicas 0", "--draft-replicas must be 1 or more", None),
        (4, "--target-replicas 2 --tp-size 2 --nnodes 2 --dist-init-addr a:1", "replicas of `serve` are on one machine",
         None),
        (0, "--draft-replicas 2 --draft-device tpu", "one process has all TPU chips", None),
        (1, "--target-replicas 2 --device cuda:0,cuda:0 --mem-fraction-static 0.4",
         "2 targets share cuda:0; leave it out",
         None),
        (0, "--target-replicas 2 --device cuda:0,cuda:0", "whose memory this process cannot read", None),
        (0, "--target-replicas 2 --listen-target 127.0.0.1:4000 --listen-draft 127.0.0.1:4001",
         "meet at 127.0.0.1:4001",
         None),
        (0, "--target-replicas 2 --listen-target 127.0.0.1:65535", "needs as many ports", None),
    ],
)  # fmt: skip
def test_devices_are_divided_among_replicas(monkeypatch, tmp_path, cards, flags, targets, drafts):
    put_gpus(monkeypatch, tmp_path, *[H100] * cards) if cards else take_gpus(monkeypatch, tmp_path)
    if drafts is None:
        with pytest.raises(ConfigError, match=targets):
            plan(*flags.split())
    else:
        assert used(plan(*flags.split()).made) == (targets.split(), drafts.split())


@pytest.mark.parametrize(
    ("cores", "replicas", "shares"),
    [
        (range(4), 1, [(0, 1, 2, 3)]),
        (range(4), 2, [(0, 1), (2, 3)]),
        (range(10, 15), 2, [(10, 11), (12, 13, 14)]),
        ((3,), 2, [(3,), (3,)]),
        ((3, 5), 3, [(3,), (5,), (3,)]),
        ((), 2, [(), ()]),
    ],
)
def test_cores_are_divided_among_replicas(cores, replicas, shares):
    assert share_cores(cores, replicas) == shares


def test_every_process_has_its_own_address_cores_and_name(monkeypatch, tmp_path):
    take_gpus(monkeypatch, tmp_path)
    learning = ("--speculative-algorithm", "EAGLE3", "--online", "--online-output", "/learned")
    flags = ("--target-replicas", "2", "--draft-replicas", "3", *learning)
    made = plan(*flags, "--listen-draft", "unix:/run/draft.sock").made
    children = make_children(made, Display())
    names = ["target-1", "target-2", "draft-1", "draft-2", "draft-3", "gateway"]
    assert [child.name for child in children] == names
    verbs = [child.command[child.command.index("outrider") + 1] for child in children]
    assert verbs == [name.partition("-")[0] for name in names]
    assert [child.optional for child in children] == [False, False, True, True, True, False]
    assert made.gateway.target == tuple(one.listen for one in made.targets)
    assert made.gateway.draft == tuple(f"unix:/run/draft-{number}.sock" for number in (1, 2, 3))
    assert [Path(path).name for path in made.gateway.draft_report] == [f"draft-{n}.report" for n in (1, 2, 3)]
    assert [one.online_output for one in made.drafts] == [f"/learned/draft-{n}" for n in (1, 2, 3)]
    assert [one.cores for one in (*made.targets, *made.drafts)] == ["0,1", "2,3,4", "5", "6", "5"]
    tcp = plan(*flags, "--listen-target", "127.0.0.1:4000", "--listen-draft", "[::1]:5000").made
    assert tcp.gateway.target == ("127.0.0.1:4000", "127.0.0.1:4001")
    assert tcp.gateway.draft == ("[::1]:5000", "[::1]:5001", "[::1]:5002")


def test_processes_on_one_gpu_divide_its_memory(monkeypatch, tmp_path, model):
    put_gpus(monkeypatch, tmp_path, H100, H100)
    total = devices.gpu_memory()
    flags = ["--model", str(model), "--speculative-draft-model", str(model)]

    def plans(*more):
        made = plan(*flags, *more).made
        return made, [memory.plan_of(target, None) for target in made.targets]

    made, (first, second, third) = plans(
        "--target-replicas", "3", "--target-devices", "cuda:0,cuda:0,cuda:1", "--draft-replicas", "2",
        "--draft-devices", "cuda:0,cuda:0",
    )  # fmt: skip
    drafts = sum(one.draft_memory_bytes for one in made.drafts)
    own = [one.weights + one.working + one.kv_bytes for one in (first, second)]
    assert own[0] == own[1]
    assert total * 0.93 < sum(own) + drafts < total * 0.98
    assert made.targets[2].draft_headroom_bytes is None
    assert third.kv_bytes > 1.9 * first.kv_bytes
    assert (
        plans("--target-replicas", "2", "--device", "cuda:0,cuda:0", "--max-total-tokens", "1600")[1][1].tokens == 1600
    )
    # drafts that share a GPU without a target
    made, _ = plans("--draft-replicas", "2", "--draft-devices", "cuda:1,cuda:1")
    assert [one.draft_memory_bytes for one in made.drafts] == [total // 2] * 2
    made, _ = plans("--draft-replicas", "2", "--draft-devices", "cuda:1,cuda:1", "--draft-memory-bytes", str(3 * GIB))
    assert [one.draft_memory_bytes for one in made.drafts] == [3 * GIB] * 2


def test_targets_on_one_cpu_divide_its_free_memory(monkeypatch, tmp_path):
    take_gpus(monkeypatch, tmp_path)
    made = plan("--target-replicas", "2").made
    assert [one.mem_fraction_static for one in made.targets] == [0.25, 0.25]
    assert plan("--target-replicas", "2", "--mem-fraction-static", "0.1").made.target.mem_fraction_static == 0.1


def test_a_dry_run_shows_every_replica(monkeypatch, tmp_path, capsys):
    take_gpus(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    folder = write_model(tmp_path / "model")
    flags = [
        "--target-replicas",
        "2",
        "--draft-replicas",
        "2",
        "--speculative-algorithm",
        "NGRAM",
        "--log-level",
        "debug",
    ]
    assert cli.main(["serve", "--dry-run", "--model", str(folder), *flags]) == 0
    text = capsys.readouterr().out
    assert "\ntarget-1\n  device   CPU, found by --device auto\n  cores    0,1\n  set      --log-level debug\n" in text
    other = "cores    2,3,4\n  flags    those of target-1, but for --cores 2,3,4  "
    other += "--listen unix:PRIVATE-FOLDER/target-2.sock"
    assert f"\ntarget-2\n  device   CPU, found by --device auto\n  {other}\n" in text
    assert "\ndraft-2\n  device   CPU\n  cores    6\n" in text
    assert text.count("--log-level debug") == 3  # of each service, and of the gateway
    assert text.count("0.25 of the free memory") == 2
    assert max(map(len, text.splitlines())) <= 120


def test_a_pool_with_more_replicas_than_cores_is_warned_of(monkeypatch, tmp_path):
    take_gpus(monkeypatch, tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    made = plan("--target-replicas", "3")
    assert [one.cores for one in made.made.targets] == ["0", "1", "0"]
    assert any(text.startswith("3 target replicas share the cores 0,1") for text in made.warnings)


def test_draft_replicas_without_a_draft_are_warned_of(monkeypatch, tmp_path):
    take_gpus(monkeypatch, tmp_path)
    made = plan("--draft-replicas", "3", "--speculative-algorithm", "NONE")
    assert made.made.drafts == ()
    assert any(text.startswith("--draft-replicas 3 starts no draft") for text in made.warnings)


def test_drafts_of_a_machine_with_a_tpu_are_refused(monkeypatch, tmp_path):
    take_gpus(monkeypatch, tmp_path)
    monkeypatch.setattr(replicas, "tpu_chips", lambda: 4)
    with pytest.raises(ConfigError, match="one process has all TPU chips"):
        plan("--draft-replicas", "2")
    assert used(plan("--draft-replicas", "2", "--speculative-algorithm", "NGRAM").made)[1] == ["auto", "auto"]
