"""The drafter of `serve` without --speculative-algorithm."""

import os
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from outrider.config import ServeConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.placement import devices
from outrider.supervisor.app import check_flags
from outrider.supervisor.drafter_choice import choose_drafters


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Two cores, which all processes share, and no GPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(devices, "_GPU", tmp_path / "none")


def chosen(**parts):
    """The drafter and the target's self-speculation for some flags."""
    config = ServeConfig()
    for name, flags in parts.items():
        value = flags if not isinstance(flags, dict) else replace(getattr(config, name), **flags)
        config = replace(config, **{name: value})
    config = choose_drafters(config)
    return config.draft.speculative_algorithm, config.target.self_speculation


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"target": {"quantization": "int8"}},
        {"target": {"tp_size": 2}},
        {"shared": {"speculative_num_draft_tokens": 8}},
        {"listen_draft": "127.0.0.1:1"},
        {"cores_draft": "1"},
        {"draft": {"speculative_ngram_branch_length": 20}},
        {"target": {"model_path": "some/model"}},
    ],
)
def test_on_shared_cores_n_grams_draft_beside_self_speculation(parts):
    assert chosen(**parts) == ("NGRAM", "auto")


@pytest.mark.parametrize("flags", [{"self_speculation": "off"}, {"self_speculation": "lookup", "device": "cpu"}])
def test_flags_of_self_speculation_are_kept_beside_n_grams(flags):
    assert chosen(target=flags) == ("NGRAM", flags["self_speculation"])


@pytest.mark.parametrize("number", [1, 2, 3, 4, 16])
def test_every_machine_has_a_drafter(monkeypatch, number):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(number)))
    assert chosen() == ("NGRAM" if number < 3 else "EAGLE3", "auto")
    assert chosen(target={"model_path": "some/model"}) == ("NGRAM", "auto")


@pytest.fixture
def model_with_mtp(tmp_path):
    """A target's folder with an MTP layer, by the names of its tensors."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"model.layers.61.eh_proj.weight": np.zeros((1, 1))}, folder / "model.safetensors")
    return str(folder)


def test_a_model_with_mtp_layers_drafts_with_them_on_cores_of_their_own(monkeypatch, model_with_mtp):
    assert chosen(target={"model_path": model_with_mtp}) == ("NGRAM", "auto")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert chosen(target={"model_path": model_with_mtp}) == ("NEXTN", "auto")


def test_a_draft_model_that_is_named_is_used_on_every_machine():
    assert chosen(draft={"speculative_draft_model_path": str(DEFAULT_HEAD)}) == ("EAGLE3", "auto")


def test_a_draft_with_cores_of_its_own_has_the_head():
    assert chosen(cores_target="0", cores_draft="1") == ("EAGLE3", "auto")


def test_where_one_service_has_a_gpu_the_head_drafts(tmp_path, monkeypatch):
    assert chosen(target={"device": "cuda"}) == ("EAGLE3", "auto")
    assert chosen(target={"device": "cpu"}, draft={"draft_device": "cuda"}) == ("EAGLE3", "auto")
    monkeypatch.setattr(devices, "_GPU", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert chosen() == ("EAGLE3", "auto")
    assert chosen(target={"device": "cpu"}) == ("NGRAM", "auto")


@pytest.mark.parametrize("flags", [{"speculative_ngram_beside": True}, {"draft_dtype": "float32"}, {"online": True}])
def test_flags_of_a_draft_model_choose_the_head(flags):
    assert chosen(draft=flags) == ("EAGLE3", "auto")


def test_a_named_drafter_turns_self_speculation_off():
    def named(algorithm, **target):
        return chosen(draft={"speculative_algorithm": algorithm}, target=target)

    assert named("NONE") == ("NONE", "off")
    assert named("NGRAM") == ("NGRAM", "off")
    assert named("NGRAM", self_speculation="quantized") == ("NGRAM", "quantized")


def test_the_bundled_head_is_found_by_its_algorithm():
    draft = replace(ServeConfig().draft, speculative_algorithm="EAGLE3")
    config = choose_drafters(replace(ServeConfig(), draft=draft))
    assert config.draft.speculative_draft_model_path == str(DEFAULT_HEAD)
    check_flags(config)


def test_a_draft_model_that_is_not_here_needs_its_algorithm():
    with pytest.raises(ConfigError, match="name it with --speculative-algorithm"):
        chosen(draft={"speculative_draft_model_path": "some/draft"})
