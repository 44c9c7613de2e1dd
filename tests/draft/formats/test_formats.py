"""Published heads: every layout gives the same parameters, and unsupported ones are refused with a reason."""

import io
import pickle
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load

from outrider.checkpoints import checkpoint
from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat
from services.draft.formats.eagle import read_eagle
from services.draft.formats.eagle3 import read_eagle3
from services.draft.formats.target import read_target
from services.draft.model.weights.torch_files import load_torch_file
from services.draft.process import app
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.tiny import VOCAB, write_model

H = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("target"), num_hidden_layers=8, tie_word_embeddings=False)


def read(kind, folder, target):
    return {"EAGLE": read_eagle, "EAGLE3": read_eagle3}[kind](folder, read_target(target))


def same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


def renamed(tensors, change):
    return {change(name): tensor for name, tensor in tensors.items()}


# --- layouts ---


def test_eagle_in_every_layout(tmp_path, target):
    config, tensors = eagle(target, num_key_value_heads=2, rope_theta=500000.0)
    plain = read("EAGLE", write_head(tmp_path / "plain", config, tensors), target)
    expected = plain.load(jnp.float32)
    copies = {"embed_tokens.weight": np.zeros((VOCAB, H), np.float32)}
    layouts = {
        "torch": (config, tensors | copies, True),
        "sglang": (
            config | {"architectures": ["LlamaForCausalLMEagle"]},
            renamed(tensors | copies, lambda name: f"model.{name}")
            | {"lm_head.weight": np.zeros((VOCAB, H), np.float32)},
            False,
        ),
    }
    for name, (settings, content, torch_file) in layouts.items():
        draft = read("EAGLE", write_head(tmp_path / name, settings, content, torch_file=torch_file), target)
        same(draft.load(jnp.float32), expected)
        assert draft.config.layers == plain.config.layers
    assert plain.features.final
    assert plain.features.layers == ()
    assert plain.config.layers[0].attention.rope.theta == 500000.0


def test_old_eagle_configurations(tmp_path, target):
    """Vicuna's heads lack key-value heads and rope_theta; and `bias`, which is then true."""
    config, tensors = eagle(
        target, num_key_value_heads="absent", num_attention_heads=2, rope_theta="absent", head_dim="absent",
        num_hidden_layers=1,
    )  # fmt: skip
    q = tensors["layers.0.self_attn.q_proj.weight"]
    shapes = {"q": 48, "k": 48, "v": 48}
    for name, rows in shapes.items():
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = np.resize(q, (rows, H))
    tensors["layers.0.self_attn.o_proj.weight"] = np.resize(q, (H, 48))
    del config["bias"]
    draft = read("EAGLE", write_head(tmp_path / "head", config, tensors), target)
    attention = draft.config.layers[0].attention
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.rope.theta) == (2, 2, 24, 10000.0)
    assert "fuse_bias" in draft.load(jnp.float32)
    del tensors["fc.bias"]
    assert "fuse_bias" not in read("EAGLE", write_head(tmp_path / "no bias", config, tensors), target).load(jnp.float32)


def test_eagle3_in_every_layout(tmp_path, target):
    config, tensors = eagle3(target)
    expected = read("EAGLE3", write_head(tmp_path / "plain", config, tensors), target)
    inner = {key: config[key] for key in config if key not in ("architectures", "draft_vocab_size")}
    speculators = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": {},
        "transformer_layer_config": inner, "draft_vocab_size": 200, "target_hidden_size": None,
        "norm_before_residual": False,
    }  # fmt: skip
    layers = renamed(tensors, lambda name: name.replace("midlayer.", "layers.0."))
    embed = {"embed_tokens.weight": np.zeros((VOCAB, H), np.float32)}  # some exporters ship random ones
    layouts = {
        "angelslim": (
            config | {"architectures": ["LlamaForCausalLM"]}, {k: v for k, v in tensors.items() if k != "t2d"}
        ),
        "speculators": (speculators, layers | embed),
        "prefixed": (config, renamed(tensors, lambda name: name if name == "d2t" else f"model.{name}")),
        "torch": (config, tensors | embed),
    }  # fmt: skip
    for name, (settings, content) in layouts.items():
        draft = read("EAGLE3", write_head(tmp_path / name, settings, content, torch_file=name == "torch"), target)
        same(draft.load(jnp.float32), expected.load(jnp.float32))
        assert draft.config.layers == expected.config.layers
        assert draft.fusion == expected.fusion
    params = expected.load(jnp.float32)
    np.testing.assert_array_equal(params["ids"], np.arange(200) + tensors["d2t"])
    np.testing.assert_array_equal(load(expected.fusion)["fc.weight"], tensors["fc.weight"])


def test_norm_before_residual_is_true_for_speculators_alone(tmp_path, target):
    config, tensors = eagle3(target)
    plain = read("EAGLE3", write_head(tmp_path / "plain", config, tensors), target)
    wrapped = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": config}
    wrapped |= {"draft_vocab_size": 200, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    other = read("EAGLE3", write_head(tmp_path / "other", wrapped, tensors), target)
    assert [draft.config.layers[0].residual_after_norm for draft in (plain, other)] == [False, True]
    assert [draft.features.layers for draft in (plain, other)] == [(), (2, 4, 5)]


def test_layer_ids_name_outputs(tmp_path, target):
    for name, where in {"top": {}, "inner": {"eagle_config": {}}}.items():
        config, tensors = eagle3(target, **where)
        config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"] = [6, 1, 3]
        assert read("EAGLE3", write_head(tmp_path / name, config, tensors), target).features.layers == (2, 4, 7)


def test_null_values_are_ignored(tmp_path, target):
    """A null value equals a missing key."""
    config, tensors = eagle3(target, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6]})
    plain = read("EAGLE3", write_head(tmp_path / "plain", config, tensors), target)
    nulls = dict.fromkeys(["eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state", "max_position_embeddings"])
    nulled = read("EAGLE3", write_head(tmp_path / "nulled", config | nulls, tensors), target)
    assert nulled.features == plain.features
    assert nulled.features.layers == (2, 4, 7)
    assert nulled.config.context == 2048
    wrapped = {"transformer_layer_config": config, "norm_before_residual": None}
    other = read("EAGLE3", write_head(tmp_path / "other", wrapped, tensors), target)
    assert other.config.layers[0].residual_after_norm


def test_fusions(tmp_path, target):
    """Norms of EAGLE-3.1 with either name, one norm over all states, and the last state alone."""
    rng = np.random.default_rng(0)
    each = {f"aux_norm_{name}.weight": rng.standard_normal(H).astype(np.float32) for name in ("low", "mid", "high")}
    config, tensors = eagle3(target, use_aux_norm=True)
    old = read("EAGLE3", write_head(tmp_path / "old", config, tensors | each), target)
    new = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(each.values())}
    config, tensors = eagle3(target, fc_norm=True)
    assert read("EAGLE3", write_head(tmp_path / "new", config, tensors | new), target).fusion == old.fusion
    assert set(load(old.fusion)) == {"fc.weight", *new}
    whole = {"input_norm.weight": rng.standard_normal(3 * H).astype(np.float32)}
    config, tensors = eagle3(target, eagle_config={"norm_before_fc": True})
    draft = read("EAGLE3", write_head(tmp_path / "whole", config, tensors | whole), target)
    np.testing.assert_array_equal(load(draft.fusion)["norm_before_fc.weight"], whole["input_norm.weight"])
    config, tensors = eagle3(target, eagle_config={"use_aux_hidden_state": False})
    del tensors["fc.weight"]
    draft = read("EAGLE3", write_head(tmp_path / "last", config, tensors), target)
    assert (draft.features.final, draft.features.layers, draft.fusion) == (True, (), b"")


def test_vocabulary_equal_to_the_targets(tmp_path, target):
    """With offsets of 0, without any, and without a head of its own."""
    config, tensors = eagle3(target, vocab=VOCAB)
    assert not tensors["d2t"].any()
    params = read("EAGLE3", write_head(tmp_path / "zeros", config, tensors), target).load(jnp.float32)
    assert "ids" not in params
    none = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    same(read("EAGLE3", write_head(tmp_path / "none", config, none), target).load(jnp.float32), params)
    config, tensors = eagle3(target, vocab=None)
    shared = read("EAGLE3", write_head(tmp_path / "shared", config, tensors), target).load(jnp.float32)
    expected = read_target(target).embedding_and_head(jnp.asarray)
    same({name: shared[name] for name in ("embed", "head")}, expected)


# --- refusals ---

EAGLE_REFUSALS = {
    "no fc": ({}, lambda t: t.pop("fc.weight"), r"lacks 1 tensors of an EAGLE head: fc\.weight"),
    "no bias": ({"bias": True}, lambda t: t.pop("fc.bias"), r"lacks 1 tensors.*fc\.bias"),
    "a bias": ({"bias": False}, lambda t: None, r"does not have: fc\.bias"),
    "a norm too many": (
        {}, lambda t: t.update({"layers.0.input_layernorm.weight": np.ones(H, np.float32)}),
        r"does not have: layers\.0\.input_layernorm",
    ),
    "shape": (
        {}, lambda t: t.update({"fc.weight": np.ones((H, H), np.float32)}),
        r"fc\.weight has shape \[48, 48\].*\[48, 96\]",
    ),
    "width": ({"hidden_size": 32}, lambda t: None, "hidden_size 32, not 48"),
    "vocabulary": ({"vocab_size": 999}, lambda t: None, f"vocab_size 999, not {VOCAB}"),
    "activation": ({"hidden_act": "gelu"}, lambda t: None, "activation 'gelu'"),
    "no size": ({"intermediate_size": "absent"}, lambda t: None, "lacks 'intermediate_size'"),
}  # fmt: skip
EAGLE3_REFUSALS = {
    "ids": ({}, lambda t: t.update({"d2t": t["d2t"] + np.arange(200)}), "must hold offsets"),
    "floats": ({}, lambda t: t.update({"d2t": t["d2t"].astype(np.float32)}), "d2t has number format F32; expected"),
    "no offsets": ({}, lambda t: t.pop("d2t"), "lacks d2t"),
    "members": ({}, lambda t: t.update({"t2d": ~t["t2d"]}), "d2t and t2d .* name different tokens"),
    "length": ({}, lambda t: t.update({"d2t": t["d2t"][:-1]}), r"d2t has shape \[199\]"),
    "head": ({}, lambda t: t.pop("lm_head.weight"), r"lacks 1 tensors of an EAGLE-3 head: lm_head\.weight"),
    "fusion": (
        {"eagle_aux_hidden_state_layer_ids": [1, 2]}, lambda t: None, r"fc\.weight has shape \[48, 144\].*\[48, 96\]"
    ),
    "layers": ({"num_aux_hidden_states": 4}, lambda t: None, "does not name their layers"),
    "contradiction": (
        {"num_aux_hidden_states": 4, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, lambda t: None, "names 3 layers"
    ),
    "unknown": ({}, lambda t: t.update({"extra": np.ones(3, np.float32)}), "does not have: extra"),
    "width": ({"target_hidden_size": 64}, lambda t: None, "hidden_size 64, not 48"),
    "no head that fits": (
        {"hidden": 32, "vocab": None}, lambda t: None,
        "the target's does not fit: its inputs have 48 dimensions, the draft's states 32"
    ),
    "no embedding": ({"hidden": 32}, lambda t: t.pop("embed_tokens.weight"), r"lacks 1 tensors.*embed_tokens"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name"),
    [("EAGLE", name) for name in EAGLE_REFUSALS] + [("EAGLE3", name) for name in EAGLE3_REFUSALS],
)
def test_unsupported_configurations_are_refused(tmp_path, target, kind, name):
    make, refusals = {"EAGLE": (eagle, EAGLE_REFUSALS), "EAGLE3": (eagle3, EAGLE3_REFUSALS)}[kind]
    changes, spoil, message = refusals[name]
    making = {key: changes[key] for key in ("hidden", "vocab") if key in changes}
    config, tensors = make(target, **making)
    config |= {key: value for key, value in changes.items() if key not in making}
    config = {key: value for key, value in config.items() if value != "absent"}
    spoil(tensors)
    with pytest.raises(ConfigError, match=message):
        read(kind, write_head(tmp_path / "head", config, tensors), target).load(jnp.float32)


def test_heads_of_the_other_kind(tmp_path, target):
    with pytest.raises(ConfigError, match="holds an EAGLE-3 head; load it with --speculative-algorithm EAGLE3"):
        read("EAGLE", write_head(tmp_path / "three", *eagle3(target)), target)
    with pytest.raises(ConfigError, match=r"lacks \d+ tensors of an EAGLE-3 head"):
        read("EAGLE3", write_head(tmp_path / "one", *eagle(target)), target)


# --- files of torch ---


def test_torch_files_without_torch(tmp_path):
    import torch

    state = {
        "half": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "turned": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "part": torch.arange(12, dtype=torch.int64)[3:7],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "truth": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    torch.save(state, tmp_path / "file.bin")
    found = load_torch_file(tmp_path / "file.bin")
    for name, tensor in state.items():
        expected = tensor.detach()
        expected = expected.float().numpy() if expected.is_floating_point() else expected.numpy()
        assert np.array_equal(found[name].astype(expected.dtype), expected), name
        assert found[name].shape == expected.shape
    torch.save([5, 3, 9], tmp_path / "list.pt")
    assert load_torch_file(tmp_path / "list.pt") == [5, 3, 9]


def test_torch_files_with_code_are_refused(tmp_path):
    import torch

    torch.save({"path": tmp_path}, tmp_path / "object.bin")
    with pytest.raises(ConfigError, match="holds more than tensors: it names pathlib"):
        load_torch_file(tmp_path / "object.bin")
    (tmp_path / "text.bin").write_text("no zip")
    with pytest.raises(ConfigError, match="was not written by torch"):
        load_torch_file(tmp_path / "text.bin")


def pickled(file, storage, offset, size, stride, *, packed=False):
    """A file as of torch.save, with one tensor as a view of three float32 numbers."""
    torch_save = io.BytesIO()
    with zipfile.ZipFile(torch_save, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        words = f"ctorch._utils\n_rebuild_tensor_v2\n((Vstorage\n{storage}V0\nVcpu\nI3\ntQ".encode()
        parts = b"".join(pickle.dumps(part, 2)[2:-1] for part in (offset, size, stride))  # without header and end
        archive.writestr("archive/data.pkl", b"\x80\x02" + words + parts + b"tR.")
        archive.writestr("archive/data/0", np.arange(3, dtype=np.float32).tobytes())
    file.write_bytes(torch_save.getvalue())
    return file


FLOATS = "ctorch\nFloatStorage\n"


@pytest.mark.parametrize(("storage", "offset", "size", "stride", "words"), [
    (FLOATS, -1, (2,), (1,), "negative"),
    (FLOATS, 2, (3,), (-1,), "negative"),
    (FLOATS, 0, (-3,), (1,), "negative"),
    (FLOATS, 0, (2,), (1.0,), "negative"),
    (FLOATS, 0, (4,), (1,), "beyond its storage"),
    (FLOATS, 0, (2, 2), (1 << 60, 1), "beyond its storage"),
    (FLOATS, 0, (1 << 40,), (0,), "larger than its storage"),
    (FLOATS, 0, (2,), (1, 1), "zip"),
    (FLOATS, 0, (1,) * 100, (1,) * 100, "dimension"),
    (FLOATS, 0, "ab", (1, 1), "negative"),
    ("Vfloat32\n", 0, (2,), (1,), "refers to"),
])  # fmt: skip
def test_views_beyond_their_storage_are_refused(tmp_path, storage, offset, size, stride, words):
    """A tensor is never a view of other memory, nor larger than what the file holds."""
    with pytest.raises(ConfigError, match=words):
        load_torch_file(pickled(tmp_path / "file.bin", storage, offset, size, stride))


def test_compressed_torch_files_are_refused(tmp_path):
    assert load_torch_file(pickled(tmp_path / "plain.bin", FLOATS, 1, (2,), (1,))).tolist() == [1, 2]
    with pytest.raises(ConfigError, match="compressed"):
        load_torch_file(pickled(tmp_path / "packed.bin", FLOATS, 1, (2,), (1,), packed=True))


# --- the process ---


def test_handshake_facts(tmp_path, target):
    folder = write_head(tmp_path / "head", *eagle3(target), torch_file=True)
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(folder), model_path=str(target),
        draft_max_total_tokens=1024, max_running_requests=1, draft_feature_dtype="float8_e4m3",
    )  # fmt: skip
    engine, model = app.build(config)
    info = app.describe(engine, model)
    assert (info.drafters, info.max_session_tokens) == (["EAGLE3"], 1024)
    assert (info.model.vocab_size, info.model.vocab_hash) == (VOCAB, checkpoint.vocab_hash(target))
    assert info.model.fingerprint == checkpoint.fingerprint(folder)
    assert info.features.format == int(FeatureFormat.FLOAT8_E4M3)
    assert engine.drafter.fusion


@pytest.mark.parametrize("name", ["eagle3", "Eagle3", "EAGLE3"])
def test_flags(name, capsys):
    assert (
        app.main(["--speculative-algorithm", name, "--speculative-draft-model-path", "x", "--log-level", "error"]) == 2
    )
    assert "--speculative-algorithm EAGLE3 needs --model-path" in capsys.readouterr().err
