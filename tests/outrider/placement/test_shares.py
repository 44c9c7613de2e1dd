"""`--cores auto`: three independently started processes share a machine as `outrider serve` divides it."""

import os
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
