"""MTP layers in JAX against the decoder layer of `transformers`: prefill, trees on own states, commits, corrections."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureBlock, FeatureSpec
from outrider.speculation.proposal import Commit, path_hash
from outrider.speculation.tree import ROOT
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target
from services.draft.process.app import build
from tests.support.checkpoints.mtp import Reference, as_multimodal, mtp_layer, prefix_of, write_mtp
from tests.support.draft.helpers import feature_engine, request, settle
from tests.support.draft.stepping import Stepper
from tests.support.tiny import VOCAB

YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 1.0, "mscale_all_dim": 0.4, "type": "yarn",
    "original_max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {
    "deepseek": ("deepseek-v3", {}),
    "deepseek, no groups, query at once": (
        "deepseek-v3",
        {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "norm_topk_prob": False, "rope_scaling": YARN},
    ),
    "glm": ("glm-4.5", {}),
    "glm air": ("glm-4.5", {"use_qk_norm": False, "num_key_value_heads": 1, "attention_bias": False}),
    "mimo": ("mimo", {}),
    "mimo-v2": ("mimo-v2", {}),
    "qwen3-next": ("qwen3-next", {}),
}  # fmt: skip


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=5e-4, atol=5e-4)


def follow(draft, reference, width=48):
    """Prefill in chunks, a tree on own states, a commit, and the correction, each against the reference."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, VOCAB, 24).tolist()
    features = rng.standard_normal((40, width)).astype(np.float32)
    model = Stepper(draft.config, draft.load(jnp.float32), tokens)
    whole = reference.logits(tokens, features[:23])
    for feed in (5, 1, 16, 1):
        start = model.prefix_kv.settled
        close(model.run(16, feed=feed, features=features[start : start + feed])[:feed], whole[start : start + feed])

    def expand(nodes, true):
        logits = model.run(4, nodes=tuple(nodes))
        for i, node in enumerate(nodes):
            path = model.session.tokens.tolist() + model.session.tree.path_tokens(node)
            close(logits[i], reference.logits(path, features[:true])[-1])

    model.session.grower.add(ROOT, [5, 6, 7], [-1, -1, -1], [-0.1, -1.0, -2.0])
    expand([0, 1, 2], 23)
    model.session.grower.add(0, [8, 9], [-1, -1], [-0.1, -1.0])
    model.session.grower.add(1, [8], [-1], [-0.1])
    expand([3, 5], 23)
    model.commit([5, 8])
    model.session.grower.add(ROOT, [12], [-1], [-0.1])
    expand([0], 23)
    model.session.regrow()
    model.prefix_kv.forget_provisional()
    close(model.run(4, feed=2, features=features[23:25])[:2], reference.logits(model.session.tokens, features)[23:25])
    model.session.grower.add(ROOT, [9], [-1], [-0.1])
    expand([0], 25)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_mtp_layer_equals_its_model_class(tmp_path, name):
    family, changes = FAMILIES[name]
    folder = write_mtp(tmp_path / "model", family, **changes)
    draft = read_mtp(folder, read_target(folder))
    assert draft.features == (FeatureSpec(layers=(3,)) if family == "mimo-v2" else FeatureSpec(final=True))
    follow(draft, Reference(folder, family, tmp_path / "scratch"))


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3.5-moe"])
def test_mtp_layer_of_a_multimodal_model(tmp_path, family):
    folder = write_mtp(tmp_path / "model", family)
    whole = as_multimodal(folder, tmp_path / "whole")
    follow(read_mtp(whole, read_target(whole)), Reference(folder, family, tmp_path / "scratch"))


def test_several_layers_beside_ngrams(tmp_path):
    """In a repetitive text n-grams propose more levels than there are layers; states arrive after commits."""
    folder = write_mtp(tmp_path / "model", "mimo-v2", layers=3)
    engine = feature_engine("NEXTN", folder, folder, speculative_ngram_beside=True)
    width, rng = engine.drafter.runner.config.hidden_size, np.random.default_rng(0)
    cycle = [10, 11, 12, 13, 14, 15]
    tokens, known = cycle * 4, 0
    engine.open(request(1, tokens, max_tokens=400))
    for _ in range(6):
        rows = rng.standard_normal((len(tokens) - 1 - known, width)).astype(np.float32)
        engine.receive_features([FeatureBlock(1, known, rows.view(np.uint8))])
        known += len(rows)
        settle(engine)
        new = [cycle[(len(tokens) + i) % 6] for i in range(5)]
        tokens += new
        engine.receive([], [Commit(1, len(tokens) - 5, np.array(new, np.uint32), path_hash(np.array(tokens)))])
        engine.step()
    assert 1 in engine.running
    engine.check()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "count", "length"), [("mimo-v2", 3, 24), ("mimo-v2", 3, 4), ("glm-4.5", 2, 24)])
def test_several_layers_each_predict_a_token_further(tmp_path, family, count, length):
    """Layer i's row j pairs token j + 1 + i with the target's feature j, and no other feature."""
    folder = write_mtp(tmp_path / "model", family, layers=count)
    prefixes = [prefix_of(family, i) for i in range(count)]
    layers = [Reference(folder, family, tmp_path / f"{i}", prefix=prefix) for i, prefix in enumerate(prefixes)]
    draft = read_mtp(folder, read_target(folder), several=True)
    assert draft.config.stacked
    rng = np.random.default_rng(1)
    tokens, known = rng.integers(0, VOCAB, length).tolist(), length - 1
    features = rng.standard_normal((40, 48)).astype(np.float32)
    model = Stepper(draft.config, draft.load(jnp.float32), tokens)
    whole = layers[0].logits(tokens, features[:known])
    for feed in (known - 2, 1, 1):
        start = model.prefix_kv.settled
        close(model.run(24, feed=feed, features=features[start : start + feed])[:feed], whole[start : start + feed])

    def expand(nodes, true):
        logits = model.run(4, nodes=tuple(nodes))
        for i, node in enumerate(nodes):
            path = model.session.tokens.tolist() + model.session.tree.path_tokens(node)
            ahead = len(path) - 1 - true
            close(logits[i], layers[ahead].logits(path[ahead:], features[:true])[-1])

    model.session.grower.add(ROOT, [5, 6, 7], [-1, -1, -1], [-0.1, -1.0, -2.0])
    expand([0, 1, 2], known)
    model.session.grower.add(0, [8, 9], [-1, -1], [-0.1, -1.0])
    model.session.grower.add(1, [8], [-1], [-0.1])
    if count > 2:
        expand([3, 5], known)
    model.commit([5])
    if count > 2:
        model.session.grower.add(0, [11], [-1], [-0.1])
        model.session.grower.add(ROOT, [12], [-1], [-0.1])
        expand([model.session.tree.path_of([12])[0]], known)  # while an accepted row moves
    model.session.regrow()
    model.prefix_kv.forget_provisional()
    close(
        model.run(4, feed=1, features=features[known:length])[0],
        layers[0].logits(model.session.tokens, features[:length])[-1],
    )
    model.session.grower.add(ROOT, [9], [-1], [-0.1])
    expand([0], length)
    if count > 2:
        model.session.grower.add(0, [4], [-1], [-0.1])
        expand([1], length)


def test_chained_layers_read_the_state_of_the_layer_before(tmp_path):
    """Step-3.5: layer i's row j pairs token j + 1 + i with the state that layer i - 1 passed on for row j."""
    folder = write_mtp(tmp_path / "model", "step-3.5", layers=3)
    layers = [
        Reference(folder, "step-3.5", tmp_path / f"{i}", prefix=prefix_of("step-3.5", i), own="raw") for i in range(3)
    ]
    draft = read_mtp(folder, read_target(folder))
    assert (draft.config.stacked, draft.config.chained, draft.features) == (True, True, FeatureSpec(layers=(3,)))

    def chained(path, known):
        """Logits behind a path whose first `known` features are the target's."""
        ahead, states = len(path) - 1 - known, torch.tensor(features[:known])
        for i in range(ahead + 1):
            normed, states = layers[i].rows(layers[i].embed(path[1 + i : 1 + i + known]), states)
        return (normed[-1] @ layers[ahead].head.T).numpy()

    rng = np.random.default_rng(1)
    tokens, known = rng.integers(0, VOCAB, 24).tolist(), 23
    features = rng.standard_normal((40, 48)).astype(np.float32)
    model = Stepper(draft.config, draft.load(jnp.float32), tokens)
    for feed in (9, 12, 1, 1):
        end = model.prefix_kv.settled + feed
        logits = model.run(24, feed=feed, features=features[end - feed : end])
        close(logits[feed - 1], chained(tokens[: end + 1], end))

    def expand(nodes, known):
        logits = model.run(4, nodes=tuple(nodes))
        for i, node in enumerate(nodes):
            close(logits[i], chained(model.session.tokens.tolist() + model.session.tree.path_tokens(node), known))

    model.session.grower.add(ROOT, [5, 6, 7], [-1, -1, -1], [-0.1, -1.0, -2.0])
    expand([0, 1, 2], known)
    model.session.grower.add(0, [8, 9], [-1, -1], [-0.1, -1.0])
    model.session.grower.add(1, [8], [-1], [-0.1])
    expand([3, 5], known)
    model.commit([5])
    model.session.grower.add(ROOT, [12], [-1], [-0.1])
    expand([model.session.tree.path_of([12])[0]], known)  # while an accepted row moves
    model.session.regrow()
    model.prefix_kv.forget_provisional()
    logits = model.run(4, feed=1, features=features[known : known + 1])
    close(logits[0], chained(model.session.tokens.tolist(), known + 1))
    model.session.grower.add(ROOT, [9], [-1], [-0.1])
    expand([0], known + 1)
    model.session.grower.add(0, [4], [-1], [-0.1])
    expand([1], known + 1)


def test_number_of_used_layers(tmp_path, deepseek):
    target = read_target(deepseek[0])
    with pytest.raises(ConfigError, match="has one MTP layer; --enable-multi-layer-eagle needs several"):
        read_mtp(deepseek[0], target, several=True)
    folder = write_mtp(tmp_path / "glm", "glm-4.5", layers=2)
    assert len(read_mtp(folder, read_target(folder)).config.layers) == 1
    both = read_mtp(folder, read_target(folder), several=True)
    assert both.config.stacked
    assert [layer.attention.first for layer in both.config.layers] == [0, 1]
    assert len(both.load(jnp.float32)["joins"]) == 2
    with pytest.raises(ConfigError, match="--speculative-num-steps 3 does not fit 2 MTP layers"):
        build(
            DraftConfig(
                speculative_algorithm="NEXTN", model_path=str(folder), enable_multi_layer_eagle=True,
                speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4,
            )
        )  # fmt: skip


def change(folder, edit):
    """Edit the tensors of a folder's only file."""
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    edit(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A target with its layer, and the layer by transformers."""
    base = tmp_path_factory.mktemp("deepseek")
    folder = write_mtp(base / "model", "deepseek-v3")
    return folder, Reference(folder, "deepseek-v3", base / "scratch")


def copy(folder, place):
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_passed_on_state_can_be_chosen(tmp_path, deepseek):
    folder = deepseek[0]
    raw = read_mtp(folder, read_target(folder), feature="raw", own="raw")
    assert raw.features == FeatureSpec(layers=(3,))
    follow(raw, Reference(folder, "deepseek-v3", tmp_path / "scratch", own="raw"))


def test_an_export_of_the_layer_alone(tmp_path, deepseek):
    """Names count from 0; embedding and head are the target's, whatever copies the export contains."""
    folder, reference = deepseek
    alone = tmp_path / "alone"
    alone.mkdir()
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["DeepseekV3ForCausalLMNextN"]}
    (alone / "config.json").write_text(json.dumps(config))
    tensors = mtp_layer(folder, "deepseek-v3", "model.layers.0.")
    tensors["model.layers.0.embed_tokens.weight"] += 1
    safetensors.torch.save_file(tensors, alone / "model.safetensors", {"format": "pt"})
    follow(read_mtp(alone, read_target(folder)), reference)


def test_weights_of_eight_bits_in_blocks(tmp_path):
    """In DeepSeek's published format; some matrices are wider than a block."""
    folder = write_mtp(tmp_path / "model", "deepseek-v3", hidden_size=160)
    scales = {}

    def widened(tensors):
        """The dequantized matrix; its scales are kept beside it, for blocks of 128 x 128."""
        for name in [name for name in tensors if "layers.3" in name and name.endswith("proj.weight")]:
            weight = tensors[name].float()
            if "eh_proj" in name:
                continue
            blocks = [-(-n // 128) for n in weight.shape]
            scale = torch.rand(blocks) * 0.01 + 0.01
            wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
            narrow = (weight / wide).to(torch.float8_e4m3fn)
            scales[name] = narrow, scale
            tensors[name] = narrow.float() * wide

    change(folder, widened)
    reference = Reference(folder, "deepseek-v3", tmp_path / "scratch")
    change(folder, lambda t: t.update({name: narrow for name, (narrow, _) in scales.items()}))
    change(folder, lambda t: t.update({f"{name}_scale_inv": scale for name, (_, scale) in scales.items()}))
    assert any(max(scale.shape) > 1 for _, scale in scales.values())
    draft = read_mtp(folder, read_target(folder))
    follow(draft, reference, 160)

    name = "model.layers.3.self_attn.o_proj.weight"
    change(folder, lambda t: t.update({f"{name}_scale_inv": torch.ones(3, 3)}))
    with pytest.raises(ConfigError, match=r"o_proj\.weight do not have the layout of their format: 3 scales for 160"):
        draft.load(jnp.float32)
    change(folder, lambda t: t.pop(f"{name}_scale_inv"))
    with pytest.raises(ConfigError, match=r"o_proj\.weight has number format F8_E4M3"):
        draft.load(jnp.float32)


def test_parts_of_a_checkpoint(tmp_path, deepseek):
    """Files with an index; files without the layer are not read."""
    folder, reference = deepseek
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    places = {name: f"model-0000{1 + ('layers.3.' in name)}-of-00002.safetensors" for name in tensors}
    for file in set(places.values()):
        part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
        part |= {name: tensor.to(torch.float8_e4m3fn) for name, tensor in part.items() if "layers.0.mlp" in name}
        safetensors.torch.save_file(part, parts / file, {"format": "pt"})
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    follow(read_mtp(parts, read_target(parts)), reference)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.3.mlp.gate.e_score_correction_bias"), r"lacks .*e_score_correction_bias"),
        (
            lambda t: t.pop("model.layers.3.hnorm.weight"),
            r"lacks 1 tensors.*mtp\.0\. stands for model\.layers\.3\..*hnorm",
        ),
        (
            lambda t: t.update({"model.layers.3.self_attn.indexer.k_norm.weight": torch.ones(4)}),
            r"does not have: model\.layers\.3\.self_attn\.indexer",
        ),
        (
            lambda t: t.update({"model.layers.3.eh_proj.weight": torch.ones(48, 48)}),
            r"model\.layers\.3\.eh_proj\.weight has shape \[48, 48\]; config\.json expects \[48, 96\]",
        ),
        (
            lambda t: t.update({"model.layers.3.mlp.experts.7.up_proj.weight": torch.ones(31, 48)}),
            r"experts\.7\.up_proj\.weight has shape \[31, 48\]; config\.json expects \[32, 48\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if "layers.3." in name],
            r"has no MTP layer: no tensor named like model\.layers\.N\.eh_proj\.weight.*--speculative-algorithm",
        ),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit(tmp_path, deepseek, edit, message):
    folder = copy(deepseek[0], tmp_path / "model")
    change(folder, edit)
    with pytest.raises(ConfigError, match=message):
        read_mtp(folder, read_target(folder))


def test_a_layer_of_another_target(tmp_path, deepseek):
    other = write_mtp(tmp_path / "other", "deepseek-v3", hidden_size=64, vocab_size=400)
    with pytest.raises(
        ConfigError, match=r"made for another target.*vocab_size 320, not 400 and hidden_size 48, not 64"
    ):
        read_mtp(deepseek[0], read_target(other))
