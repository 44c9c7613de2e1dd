"""Families of models: the greedy text is that of `transformers`, for all chunk sizes, page sizes and proposals."""

import logging

import pytest
import torch
import transformers

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.model.loading.load import load
from tests.support.checkpoints.families import FAMILIES, add_tensors, mtp_tensors, write_family
from tests.support.target.driving import engine_of, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, check_text, greedy
from tests.support.tiny import VOCAB


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_is_that_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    folder = write_family(tmp_path / "model", name)
    assert len(list(folder.glob("*.safetensors"))) > 1 or not family.shards
    expected = greedy(folder, family.remote)
    assert len(set(expected)) > NEW // 3, "a text that repeats itself proves little"
    model = load(folder, TargetConfig(device="cpu", dtype="float32", trust_remote_code=family.remote))
    assert model.architecture == family.config["architectures"][0]
    check_text(model, expected)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
def test_layers_for_drafting_are_ignored_quietly(name, tmp_path, caplog):
    folder = write_family(tmp_path / "model", name)
    before = greedy(folder)
    add_tensors(folder, mtp_tensors(folder))
    with caplog.at_level(logging.INFO):
        model = load(
            folder, TargetConfig(device="cpu", trust_remote_code=True)
        )  # the model is a known one all the same
    assert run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1] == before
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_unused_tensors_are_warned_of(tmp_path, caplog):
    folder = write_family(tmp_path / "model", "deepseek-v3")
    add_tensors(folder, {"model.layers.1.self_attn.ornament.weight": torch.zeros(3)})
    load(folder, TargetConfig(device="cpu"))
    assert "model.layers.1.self_attn.ornament.weight" in caplog.text


def test_model_code_of_a_checkpoint_is_not_run_unasked(tmp_path):
    folder = write_family(tmp_path / "model", "mimo")
    (folder / "modeling_mimo.py").write_text("raise SystemExit('run unasked')")
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        load(folder, TargetConfig(device="cpu"))


def test_model_code_that_is_missing_is_named(tmp_path):
    folder = write_family(tmp_path / "model", "mimo")
    (folder / "modeling_mimo.py").unlink()
    with pytest.raises(ConfigError, match=r"modeling_mimo\.py"):
        load(folder, TargetConfig(device="cpu", trust_remote_code=True))


def write_seeing(folder, kind):
    """A model that sees images too, as `transformers` saves it."""
    text = {
        "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.35,
        "sliding_window": 24, "pad_token_id": None,
    }  # fmt: skip
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    tokens = {"image_token_index": VOCAB - 1}
    if kind == "mistral3":
        text["model_type"], vision["model_type"] = "mistral", "pixtral"
    elif kind == "qwen3_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        text["rope_parameters"] = rope
        tokens = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2, "vision_start_token_id": VOCAB - 3,
                  "vision_end_token_id": VOCAB - 4}  # fmt: skip
    settings = transformers.CONFIG_MAPPING[kind](text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(settings, dtype=torch.float32).save_pretrained(folder)


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_vl"])
def test_models_that_see_images_too_are_served_for_text(kind, tmp_path):
    write_seeing(tmp_path, kind)
    module = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    path = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NEW):  # each from the beginning: no cache can be at fault
            path.append(int(module(input_ids=torch.tensor([path])).logits[0, -1].argmax()))
    check_text(load(tmp_path, TargetConfig(device="cpu")), path[len(PROMPT) :])
