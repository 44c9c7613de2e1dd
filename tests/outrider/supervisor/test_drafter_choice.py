"""The drafter of `serve` without --speculative-algorithm."""

import os
from dataclasses import replace

import pytest

from outrider.config import ServeConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.supervisor import drafter_choice
from outrider.supervisor.app import check_flags
from outrider.supervisor.drafter_choice import choose_drafters


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Two cores, which all processes share, and no GPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(drafter_choice, "_GPU", tmp_path / "none")


def chosen(**parts):
    """The drafter and the target's self-speculation for some flags."""
    config = ServeConfig()
    for name, flags in parts.items():
        value = flags if not isinstance(flags, dict) else replace(getattr(config, name), **flags)
        config = replace(config, **{name: value})
    config = choose_drafters(config)
    return config.draft.speculative_algorithm, config.target.self_speculation


def test_the_target_self_speculates_alone_on_shared_cores():
    assert chosen() == ("NONE", "auto")
    assert chosen(target={"quantization": "int8"}) == ("NONE", "auto")
    assert chosen(target={"self_speculation": "lookup", "device": "cpu"}) == ("NONE", "lookup")
    assert chosen(shared={"max_running_requests": 4}) == ("NONE", "auto")


@pytest.mark.parametrize(
    "parts",
    [
        {"target": {"device": "cuda"}},
        {"target": {"tp_size": 2}},
        {"target": {"enable_torch_compile": True}},
        {"target": {"attention_backend": "torch_native"}},
        {"target": {"speculative_always": True}},
        {"shared": {"speculative_num_draft_tokens": 8}},
        {"shared": {"speculative_num_steps": 3}},
        {"draft": {"speculative_ngram_beside": True}},
        {"listen_draft": "127.0.0.1:1"},
        {"cores_draft": "1"},
    ],
)
def test_flags_of_a_draft_start_one(parts):
    assert chosen(**parts) == ("EAGLE3", "auto")


def test_a_draft_with_cores_of_its_own_is_started(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert chosen() == ("EAGLE3", "auto")


def test_on_a_machine_with_a_gpu_a_draft_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_choice, "_GPU", tmp_path)
    assert chosen() == ("EAGLE3", "auto")
    assert chosen(target={"device": "cpu"}) == ("NONE", "auto")


def test_without_self_speculation_a_draft_is_started():
    assert chosen(target={"self_speculation": "off"}) == ("EAGLE3", "off")


def test_models_without_a_head_keep_their_n_grams():
    assert chosen(target={"model_path": "some/model"}) == ("NGRAM", "auto")


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


def test_a_draft_model_needs_its_algorithm():
    with pytest.raises(ConfigError, match="needs --speculative-algorithm"):
        chosen(draft={"speculative_draft_model_path": "some/draft"})
