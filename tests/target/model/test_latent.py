"""Latent attention: the cache holds what keys and values are made of, and the text stays that of all heads' own."""

import json

import pytest
import torch
import transformers

from outrider.config import TargetConfig
from services.target.engine.engine import TargetEngine
from services.target.kernels.kv_cache import KVCache
from services.target.kernels.pools import LayerShape, token_bytes
from services.target.model import latent
from services.target.model.loading.load import load
from tests.support.checkpoints.families import write_family
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, check_text, greedy
from tests.support.tiny import VOCAB

MLA = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "initializer_range": 0.35, "pad_token_id": None,
}  # fmt: skip


def test_the_cache_holds_latents(tmp_path):
    folder = write_family(tmp_path / "model", "deepseek-v3")
    config = json.loads((folder / "config.json").read_text())
    model = load_model(folder)
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    assert model.shapes == (LayerShape(1, rank + rope, rank, shared=True),) * config["num_hidden_layers"]
    assert token_bytes(model.shapes, torch.float32) == 4 * (rank + rope) * config["num_hidden_layers"]


@pytest.mark.parametrize("kind", ["deepseek_v2", "glm4_moe_lite", "minicpm3"])
def test_other_models_made_of_latents(kind, tmp_path):
    settings = transformers.AutoConfig.for_model(kind, **MLA)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).save_pretrained(tmp_path)
    expected = greedy(tmp_path)
    assert len(set(expected)) > NEW // 3
    model = load_model(tmp_path)
    assert all(shape.shared for shape in model.shapes)
    check_text(model, expected)


def test_layers_that_are_made_otherwise_stay_as_they_are(tmp_path):
    settings = transformers.AutoConfig.for_model("deepseek_v2", **MLA)
    module = transformers.AutoModelForCausalLM.from_config(settings)
    layer = module.model.layers[1].self_attn
    inner = layer.expand_kv
    layer.expand_kv = lambda c, r: inner(2 * c, r)
    assert latent.install(module) == MLA["num_hidden_layers"] - 1
    assert latent.of(layer) is None
    assert latent.of(module.model.layers[0].self_attn) is not None


def test_a_cache_in_8_bits(tmp_path):
    folder = write_family(tmp_path / "model", "deepseek-v3")
    config = TargetConfig(device="cpu", kv_cache_dtype="fp8_e4m3", max_total_tokens=1024)
    result = run(TargetEngine(load(folder, config), config), [opening(1, PROMPT, max_tokens=NEW)])
    assert len(result.new[1]) == NEW


def test_rows_are_moved_once():
    """A chain of moves through slots that are both read and written; the values lie inside the keys."""
    cache = KVCache([LayerShape(1, 3, 2, shared=True)], 2, 2, torch.float32, torch.device("cpu"))
    slots = torch.arange(2, 6)
    rows = torch.arange(12.0).reshape(4, 1, 3)
    cache.write(0, slots, rows, rows[..., :2])
    cache.move(torch.tensor([3, 4, 5]), torch.tensor([2, 3, 4]))
    assert torch.equal(cache.keys[0].flatten(0, 1)[2:5], rows[1:])
    assert torch.equal(cache.values[0].flatten(0, 1)[2:5], rows[1:, :, :2])


def test_other_sessions_do_not_change_the_text(tmp_path):
    model = load_model(write_family(tmp_path / "model", "deepseek-v3"))
    request = opening(1, PROMPT, max_tokens=NEW)
    alone = run(engine_of(model), [request]).new[1]
    others = [opening(i, PROMPT[i:], max_tokens=NEW) for i in range(2, 9)]
    assert run(engine_of(model, page_size=4), [request, *others]).new[1] == alone
