"""`--cores auto`: three independently started processes share a machine as `outrider serve` divides it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from outrider.config import DraftConfig, DraftOptions, GatewayConfig, ServeConfig, SharedOptions, TargetConfig, to_argv
from outrider.errors import ConfigError
from outrider.placement import shares
from outrider.placement.cores import choose_cores
from outrider.supervisor.app import configure
from outrider.supervisor.drafter_choice import choose_drafters
from services.draft.process import app
from tests.support.gpu_machine import H100, put_gpus, take_gpus

FLAGS = (
    "cores", "niceness", "network_cores", "speculative_num_steps", "speculative_eagle_topk",
    "speculative_num_draft_tokens", "draft_ahead",
)  # fmt: skip


def reported(config):
    return {name: getattr(config, name) for name in FLAGS if hasattr(config, name)}


@pytest.mark.parametrize("cores", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("algorithm", ["AUTO", "EAGLE3", "NGRAM", "STANDALONE"])
@pytest.mark.parametrize(
    "flags", [{}, {"speculative_num_steps": 5, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}]
)
def test_shares_are_those_of_serve(monkeypatch, cores, algorithm, flags):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    serve = ServeConfig(draft=DraftOptions(speculative_algorithm=algorithm), shared=SharedOptions(**flags))
    serve = choose_drafters(serve)
    expected = configure(serve, choose_cores(serve), Path("/run"))
    draft = shares.share_of_draft(
        DraftConfig(speculative_algorithm=algorithm, model_path="default", cores="auto", **flags)
    )
    assert reported(draft) == reported(expected.draft)
    assert draft.speculative_algorithm == expected.draft.speculative_algorithm != "AUTO"
    assert shares.share_of_gateway(GatewayConfig(cores="auto")).cores == expected.gateway.cores
    target = shares.share_of_target(TargetConfig(cores="auto")).cores.split(",")
    assert target == expected.target.cores.split(",")[: len(target)]
    if algorithm != "NGRAM" or cores < 16:  # it knows not what drafts, and believes that a model does
        assert ",".join(target) == expected.target.cores


def test_other_cores_are_left_alone():
    for config, share in (
        (TargetConfig(cores="0"), shares.share_of_target),
        (DraftConfig(), shares.share_of_draft),
        (GatewayConfig(cores="1"), shares.share_of_gateway),
    ):
        assert share(config) is config


def test_explicit_flags_override_the_share(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    head = "EAGLE3"
    explicit = DraftConfig(
        speculative_algorithm=head, model_path="default", cores="auto", niceness=7, network_cores="0"
    )
    share = shares.share_of_draft(explicit)
    assert (share.cores, share.niceness, share.network_cores) == ("1", 7, "0")
    with pytest.raises(ConfigError, match="name it with --speculative-algorithm"):
        shares.share_of_draft(DraftConfig(cores="auto", speculative_draft_model_path="x"))


def test_a_process_reports_cores_missing_from_its_share(monkeypatch, capsys):
    monkeypatch.setattr(app.gc, "set_threshold", lambda *_: None)
    assert app.main(["--cores", "auto", "--speculative-draft-model-path", "x"]) == 2
    assert capsys.readouterr().err.startswith("error: --speculative-draft-model-path x is not on this machine")


def test_the_last_cores_flag_applies():
    """Flags that users add to those of compose.yaml override them."""
    config = tyro.cli(TargetConfig, args=["--cores", "auto", "--cores", "0"])
    assert config.cores == "0"
    assert to_argv(config) == ["--cores", "0"]


# --- several containers of a service on one machine ---

_REPLICA = """
import dataclasses, os, sys
os.sched_getaffinity = lambda _: set(range(8))
from outrider.config import DraftConfig, TargetConfig
from outrider.placement.shares import share_of_draft, share_of_target
print(share_of_target(TargetConfig(cores="auto", machine_replicas=2)).cores, flush=True)
print(share_of_draft(DraftConfig(cores="auto", machine_replicas=2, model_path="default")).cores, flush=True)
sys.stdin.read()
"""


def test_replicas_that_start_alone_take_different_parts(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))

    def start():
        command = [sys.executable, "-c", _REPLICA]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return process, [process.stdout.readline().strip() for _ in range(2)]

    running = []
    try:
        running = [start(), start()]
        assert [cores for _, cores in running] == [["0,1", "5"], ["2,3,4", "6"]]
        running[0][0].kill()
        running[0][0].wait()
        running.append(start())
        assert running[2][1] == ["0,1", "5"]  # those of the one that died
    finally:
        for process, _ in running:
            process.kill()
            process.communicate()


def test_replicas_divide_gpus_and_memory_and_one_too_many_is_warned_of(monkeypatch, tmp_path, caplog):
    put_gpus(monkeypatch, tmp_path, H100, H100)
    monkeypatch.setattr(shares, "claim_number", lambda _: 1)
    target = TargetConfig(cores="auto", machine_replicas=2)
    assert shares.share_of_target(target).device == "cuda:1"
    draft = DraftConfig(cores="auto", machine_replicas=2, speculative_algorithm="STANDALONE",
                        speculative_draft_model_path="x")  # fmt: skip
    assert shares.share_of_draft(draft).draft_device == "cuda:1"
    with pytest.raises(
        ConfigError, match="--machine-replicas 2 with --tp-size 2 needs 4 devices, and this machine has 2"
    ):
        shares.share_of_target(TargetConfig(cores="auto", machine_replicas=2, tp_size=2))
    take_gpus(monkeypatch, tmp_path)
    assert shares.share_of_target(target).mem_fraction_static == 0.25
    assert not caplog.records
    alone = shares.share_of_target(TargetConfig(cores="auto"))
    assert (alone.device, alone.mem_fraction_static) == ("auto", None)
    assert "this is target 2 of the machine, and --machine-replicas is 1" in caplog.text
    with pytest.raises(ConfigError, match="--machine-replicas must be 1 or more"):
        shares.share_of_target(TargetConfig(cores="auto", machine_replicas=0))
