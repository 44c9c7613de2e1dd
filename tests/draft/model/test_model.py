"""The JAX decoder against transformers, its cache against recomputation, its candidates against the oracle."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from outrider.errors import ConfigError
from outrider.speculation import noise
from outrider.speculation.sampling import SamplingParams, filtered_log_probs
from outrider.speculation.tree import ROOT
from services.draft.formats.decoders import load_params, read_config
from services.draft.model.layers.rope import Rope
from services.draft.model.programs.noise import gumbel_from_bits, token_bits
from services.draft.model.programs.sampling import Sampling, candidates
from tests.support.draft.helpers import all_logits
from tests.support.draft.stepping import Stepper
from tests.support.tiny import VOCAB, write_model

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 2e3, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e2}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"query_pre_attn_scalar": 10, "sliding_window": 20}
SLIDES, FULL = "sliding_attention", "full_attention"
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama3 rope, biases": ("llama", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "mistral, window": ("mistral", {"sliding_window": 20}),
    "qwen2, some windows, dynamic rope": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "rope_parameters": DYNAMIC},
    ),
    "yarn": ("qwen3", {"rope_parameters": YARN}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "gemma": ("gemma", {"num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        GEMMA | {"num_hidden_layers": 3, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 4.0},
    ),
    "gemma3": (
        "gemma3_text",
        GEMMA
        | {
            "num_hidden_layers": 3,
            "layer_types": [SLIDES, FULL, SLIDES],
            "rope_parameters": {FULL: LINEAR, SLIDES: DEFAULT},
        },
    ),
}


def stepper(folder, tokens):
    config = read_config(folder)
    return Stepper(config, load_params(folder, config, jnp.float32), tokens)


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    family, options = MODELS[request.param]
    folder = tmp_path_factory.mktemp(family)
    rng = np.random.default_rng(0)
    write_model(folder, family, **options)
    _randomise_vectors(folder, rng)
    return folder


def _randomise_vectors(folder, rng):
    """Biases and norms of a fresh model are 0 and 1, which would hide mistakes."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensors[name] = (tensor + rng.standard_normal(tensor.shape) * 0.3).astype(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.sampled(2)
def test_prefix_tree_and_commit_equal_recomputation(folder):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 70).tolist()
    model = stepper(folder, tokens)
    whole = all_logits(folder, tokens)
    # Prefill, in odd chunks and single steps.
    for feed in (7, 13, 1, 16, 16, 16, 1):
        start = model.prefix_kv.computed
        logits = model.run(16, feed=feed)
        np.testing.assert_allclose(logits[:feed][-1], whole[start + feed - 1], atol=2e-4)
        if feed > 1:
            np.testing.assert_allclose(logits[1], whole[start + 1], atol=2e-4)

    # A tree of three levels: each row equals the recomputation of its own path.
    def expand(nodes):
        logits = model.run(4, nodes=tuple(nodes))
        for i, node in enumerate(nodes):
            path = tokens + model.session.tree.path_tokens(node)
            np.testing.assert_allclose(logits[i], all_logits(folder, path)[-1], atol=2e-4)

    model.session.grower.add(ROOT, [5, 6, 7], [-1, -1, -1], [-0.1, -1.0, -2.0])
    expand([0, 1, 2])
    model.session.grower.add(0, [8, 9], [-1, -1], [-0.1, -1.0])
    model.session.grower.add(1, [8], [-1], [-0.1])
    expand([3, 5])
    model.session.grower.add(3, [9, 4], [-1, -1], [-0.1, -1.0])
    expand([6, 4])

    # Committing 5, 8 moves their rows into the prefix KV; nodes below survive and can be expanded.
    session, prefix_kv = model.session, model.prefix_kv
    model.moves = prefix_kv.accept(session.length, 2, session.tree.path_of([5, 8]))
    assert prefix_kv.computed == session.length + 2
    kept = session.commit(np.array([5, 8], np.uint32), root_expanded=True)
    prefix_kv.renumber(kept, range(len(kept)))
    tokens = [*tokens, 5, 8]
    assert [session.tree.token[i] for i in range(len(session.tree))] == [9, 4]
    session.grower.add(0, [11], [-1], [-0.1])
    expand([1, 2])
    assert prefix_kv.free_slots == 64 - 3

    # A miss: the tree is gone, the root is computed as a row of the prefix KV.
    model.moves = prefix_kv.accept(session.length, 1, session.tree.path_of([77]))
    prefix_kv.renumber(session.commit(np.array([77], np.uint32), root_expanded=False), ())
    tokens = [*tokens, 77]
    np.testing.assert_allclose(model.run(4, feed=1)[0], all_logits(folder, tokens)[-1], atol=2e-4)
    prefix_kv.release()
    model.prefix.allocator.check(expected_leased=0)


def test_rope_scaling_changes_long_waves_only():
    plain, scaled = Rope(500.0), Rope(500.0, "llama3", 8.0, 1.0, 4.0, 64)
    ratio = scaled.inverse_frequencies(64) / plain.inverse_frequencies(64)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(1 / 8)
    assert np.all(np.diff(ratio) <= 0)


# --- noise and candidates ---


def test_noise_equals_the_reference():
    keys = noise.position_keys(99, np.arange(50))
    bits = token_bits(jnp.asarray(keys), jnp.arange(4000, dtype=jnp.uint32))
    np.testing.assert_array_equal(np.asarray(bits), noise.token_bits(keys[:, None], np.arange(4000)[None]))
    hard = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    for sample in (np.asarray(bits), hard):
        got = np.asarray(gumbel_from_bits(jnp.asarray(sample)))
        np.testing.assert_allclose(got, noise.gumbel_from_bits(sample), rtol=2e-6, atol=2e-6)


PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0, seed=3),
    SamplingParams(0.6, top_k=5, seed=2**63 + 1),
    SamplingParams(1.3, top_p=0.7, seed=5),
    SamplingParams(1.0, min_p=0.2, seed=6),
    SamplingParams(0.9, top_k=40, top_p=0.5, min_p=0.05, seed=7),
    SamplingParams(1.0, top_k=1, seed=8),
    SamplingParams(2.0, top_p=1e-6, seed=9),
]


def test_candidates_equal_the_oracle():
    rng = np.random.default_rng(4)
    count, rows, vocab = 4, 25, 1000
    logits = (rng.standard_normal((len(PARAMS), rows, vocab)) * 3).astype(np.float32)
    positions = np.arange(rows) + 10
    keys = np.stack([noise.position_keys(p.seed, positions) for p in PARAMS])
    sampling = Sampling(
        jnp.array([p.temperature for p in PARAMS], jnp.float32),
        jnp.array([p.top_k for p in PARAMS], jnp.int32),
        jnp.array([p.top_p for p in PARAMS], jnp.float32),
        jnp.array([p.min_p for p in PARAMS], jnp.float32),
        jnp.asarray(keys),
    )
    ids, scores = (np.asarray(x) for x in jax.jit(candidates, static_argnums=2)(jnp.asarray(logits), sampling, count))
    assert scores.max() <= 0
    assert np.all(np.exp(scores).sum(-1) <= 1 + 1e-5)
    assert np.all(scores[..., 1:] <= scores[..., :-1])
    for s, params in enumerate(PARAMS):
        for r in range(rows):
            ranked = logits[s, r].astype(np.float64)
            if not params.greedy:
                ranked = filtered_log_probs(logits[s, r], params)
                ranked = ranked + noise.gumbel(params.seed, positions[r : r + 1], np.arange(vocab))[0]
            expected = np.argsort(-ranked, kind="stable")[:count]
            possible = np.isfinite(ranked[expected])
            assert ids[s, r][possible].tolist() == expected[possible].tolist()
            assert not np.isfinite(scores[s, r][~possible]).any()


# --- refusals ---


def rewrite(folder, change):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensors.*layers\.1\.mlp\.up_proj"),
        (
            lambda t: t.update({"model.layers.0.extra": np.zeros(3, np.float32)}),
            r"does not have: model\.layers\.0\.extra",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(5, np.float32)}),
            r"model\.norm\.weight has shape \[5\]; config\.json expects \[48\]",
        ),
        (lambda t: t.update({"model.norm.weight": np.zeros(48, np.int32)}), r"number format I32"),
    ],
)
def test_unexpected_weights_are_refused(tmp_path, change, message):
    folder = write_model(tmp_path / "model")
    rewrite(folder, change)
    with pytest.raises(ConfigError, match=message):
        load_params(folder, read_config(folder), jnp.float32)


def test_sharded_bfloat16_checkpoint(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_model(tmp_path / "whole", tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    params = load_params(tmp_path / "shards", read_config(tmp_path / "shards"), jnp.float32)
    np.testing.assert_array_equal(np.asarray(params["head"]).T, model.lm_head.weight.detach().float().numpy())
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="lacks weight files"):
        load_params(tmp_path / "shards", read_config(tmp_path / "shards"), jnp.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "holds a GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "lacks 'factor'"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_unknown_configurations_are_refused(tmp_path, change, message):
    folder = write_model(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text()) | change
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=message):
        read_config(folder)


def test_gemma_3_text_and_multimodal(tmp_path):
    """Older RoPE keys; and the layout of multimodal models, of which the text part is read."""
    from safetensors.numpy import load_file, save_file

    folder = write_model(tmp_path / "text", "gemma3_text", **GEMMA, num_hidden_layers=7)
    new = read_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"], raw["layer_types"]
    raw |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 6}
    (folder / "config.json").write_text(json.dumps(raw))
    assert read_config(folder) == new
    windows = [layer.attention.window for layer in new.layers]
    assert windows == [20, 20, 20, 20, 20, None, 20]
    assert {layer.attention.rope.theta for layer in new.layers} == {1e4, 1e6}

    whole = tmp_path / "images"
    whole.mkdir()
    wrapped = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": raw}
    (whole / "config.json").write_text(json.dumps(wrapped))
    tensors = {f"language_model.{name}": t for name, t in load_file(folder / "model.safetensors").items()}
    tensors["vision_tower.vision_model.embeddings.position_embedding.weight"] = np.zeros((3, 4), np.float32)
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    assert read_config(whole) == new
    ours, theirs = (load_params(path, new, jnp.float32) for path in (whole, folder))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, theirs))


def test_old_style_configuration(tmp_path):
    folder = write_model(tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "eos_token_id": [1, 2]}
    (folder / "config.json").write_text(json.dumps(raw))
    config = read_config(folder)
    assert {layer.attention.rope for layer in config.layers} == {Rope(5e5, "linear", 4.0)}
    assert config.eos_token_ids == (1, 2)
