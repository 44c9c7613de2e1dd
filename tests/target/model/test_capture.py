"""What a model's runner hands back besides logits: hidden states, and places for new weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.serving.messages import OpenSession
from services.target.model.base import Model
from services.target.model.weight_slots import WeightSlots
from services.target.step.batch import Batch, Capture, SessionWork, build
from tests.support.target.driving import engine_of, load_model, opening
from tests.support.tiny import write_model

FAMILIES = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
PROMPT = list(range(40, 62))


def write(folder, family, **options):
    return write_model(folder, family, **({"num_hidden_layers": 4} | FAMILIES[family] | options))


def batch_of(model: Model, request: OpenSession) -> tuple[Batch, object]:
    """A batch of one whole prompt, and a cache for it."""
    engine = engine_of(model)
    engine.open(request)
    (chunk,) = engine.scheduler.plan()
    return build([SessionWork(chunk)], model.device), engine.cache


def outputs(model, capture=None):
    from dataclasses import replace

    batch, cache = batch_of(model, opening(1, PROMPT))
    with torch.inference_mode():
        return model.runner.forward(replace(batch, capture=capture), cache)


# Compiled programs where there are any, and models that run module by module.
BACKENDS = pytest.mark.parametrize("backend", ["auto", "torch_native"])


@BACKENDS
@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(family, backend, tmp_path):
    folder = write(tmp_path, family)
    truth = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    last: list[torch.Tensor] = []
    truth.model.layers[-1].register_forward_hook(
        lambda _, __, out: last.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    with torch.no_grad():
        states = truth(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    rows = np.array([0, 3, 21])
    model = load_model(folder, attention_backend=backend)
    plain = outputs(model)
    assert plain.features is None
    for layers, final in [((1, 2, 3), False), ((0,), True), ((), True), ((2, 4), True)]:
        results = outputs(model, Capture(layers, final, rows))
        # The last of transformers' states has passed the final norm already; what leaves the last layer has not.
        expected = [last[0] if i == 4 else states[i] for i in layers] + ([states[4]] if final else [])
        assert results.features.shape == (3, 48 * len(expected))
        torch.testing.assert_close(results.features, torch.cat(expected, -1)[0, rows], rtol=1e-4, atol=1e-4)
        assert torch.equal(results.logits, plain.logits)
    module = getattr(model.runner, "module", truth)  # where there are modules, no hook stays behind
    assert not any(layer._forward_pre_hooks for layer in module.model.layers)


@BACKENDS
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])  # experts are chosen otherwise in other formats
def test_states_come_in_the_format_of_the_model(family, backend, tmp_path):
    folder, capture = write(tmp_path, family), Capture((0, 2, 4), True, None)
    exact = outputs(load_model(folder), capture).features
    results = outputs(load_model(folder, attention_backend=backend, dtype="bfloat16"), capture).features
    assert (results.dtype, results.shape) == (torch.bfloat16, exact.shape)
    for mine, true in zip(results.float().split(48, -1), exact.split(48, -1), strict=True):
        assert (mine - true).norm() < 0.1 * true.norm()


@BACKENDS
@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_make_the_model_that_has_them(family, backend, tmp_path):
    old, new = write(tmp_path / "old", family), write(tmp_path / "new", family, seed=5)
    model = load_model(old, attention_backend=backend)
    before = outputs(model).logits
    tensors = load_file(new / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == dict(model.runner.weights())
    halves = sorted(tensors)[::2], sorted(tensors)[1::2]
    for names in halves:
        model.runner.update({name: tensors[name] for name in names})
    assert torch.equal(outputs(model).logits, outputs(load_model(new, attention_backend=backend)).logits)
    assert not torch.equal(outputs(model).logits, before)


@BACKENDS
def test_a_tied_head_follows_its_embedding(backend, tmp_path):
    folder = write(tmp_path, "qwen3")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    model = load_model(folder, attention_backend=backend)
    assert "lm_head.weight" not in model.runner.weights()
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.runner.update({"model.embed_tokens.weight": tensors["model.embed_tokens.weight"]})
    assert torch.equal(outputs(model).logits, outputs(load_model(folder, attention_backend=backend)).logits)


def test_weights_in_a_format_of_their_own_cannot_be_replaced():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert set(WeightSlots(module).shapes) == {"0.weight", "0.bias"}
    module[0].weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    assert WeightSlots(module).shapes == {}
