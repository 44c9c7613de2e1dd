"""Shapes of heads: of published folders, of checkpoints that training begins with, and by flags."""

import json
from dataclasses import replace

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch

from outrider.config import TrainConfig, to_argv
from outrider.errors import ConfigError
from services.draft.formats.target import read_target
from services.draft.learning.algorithms import DraftShape, algorithm_of
from services.draft.train.evaluate import CHAIN, replay
from services.draft.train.run import TrainingRun
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.draft.training import head_of, random_record, store_of, target_of
from tests.support.tiny import VOCAB, write_model


def test_the_published_folder(tmp_path):

    from services.draft.formats.eagle3 import read_eagle3
    from services.draft.model.weights.tensors import Tensors

    target = target_of(tmp_path / "target")
    algorithm, ids, params = head_of(target, layers=2)
    algorithm.publish(params, ids, tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "attention_bias": False, "mlp_bias": False, "bias": False, "tie_word_embeddings": False, "vocab_size": VOCAB,
        "draft_vocab_size": 64, "target_hidden_size": 48, "num_aux_hidden_states": 3,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "norm_before_residual": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    layer = {
        "self_attn.q_proj": (64, 96), "self_attn.k_proj": (32, 96), "self_attn.v_proj": (32, 96),
        "self_attn.o_proj": (48, 64), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
        "hidden_norm": (48,), "post_attention_layernorm": (48,),
    }  # fmt: skip
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {
        f"layers.1.{name}.weight".replace("hidden_norm", "input_layernorm"): (shape[0], 48)
        if "q_p" in name or "k_p" in name or "v_p" in name
        else shape
        for name, shape in layer.items()
    }
    expected |= {
        "midlayer.input_layernorm.weight": (48,), "fc.weight": (48, 144), "norm.weight": (48,),
        "lm_head.weight": (64, 48), "d2t": (64,), "t2d": (VOCAB,),
    }  # fmt: skip
    with Tensors(tmp_path / "head") as tensors:
        assert {name: tensors.shape(name) for name in tensors.names} == expected
        offsets = tensors.read("d2t", integers=True)
        members = tensors.read("t2d", integers=True)
        assert {tensors.read(name).dtype.name for name in expected if name not in ("d2t", "t2d")} == {"bfloat16"}
    assert (offsets.dtype, members.dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(offsets + np.arange(64), ids)
    np.testing.assert_array_equal(np.flatnonzero(members), ids)
    draft = read_eagle3(tmp_path / "head", target)
    assert draft.features.layers == (2, 4, 5) == algorithm.states.layers


def test_a_published_mtp_layer_is_one_of_qwen2(tmp_path):
    """With all tensors of such a layer in MiMo-7B; `transformers` can load config.json."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    algorithm, ids, params = head_of(target_of(tmp_path / "target"), name="NEXTN")
    algorithm.publish(params, ids, tmp_path / "head")
    config = AutoConfig.from_pretrained(tmp_path / "head")
    assert config.architectures == ["MiMoMTP"]
    joins = {f"{name}.weight" for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")}
    tensors = safetensors.torch.load_file(tmp_path / "head" / "model.safetensors")
    tensors = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    Qwen2DecoderLayer(config, 0).load_state_dict({n: t for n, t in tensors.items() if n not in joins}, strict=True)
    assert joins <= set(tensors)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_drafter_begins_with_the_target_s_last_layers(tmp_path, kind):
    """Norms of queries and keys, which Llama lacks, leave their sizes; layers of another width are random."""
    target = read_target(write_model(tmp_path / "target", kind, num_hidden_layers=6))
    theirs = safetensors.numpy.load_file(target.folder / "model.safetensors")
    shape = DraftShape(layers=2, aux_layers=(1, 3))
    algorithm = algorithm_of("DFLASH", target, shape)
    params = algorithm.first_params(target, np.arange(VOCAB), np.ones(3, np.float32), seed=0)
    for i, own in enumerate(params["layers"], start=4):
        np.testing.assert_array_equal(own["down"], theirs[f"model.layers.{i}.mlp.down_proj.weight"].T)
        norm = theirs.get(f"model.layers.{i}.self_attn.q_norm.weight")
        if norm is not None:
            np.testing.assert_array_equal(own["q_norm"], norm)
        else:
            x = np.random.default_rng(1).standard_normal((500, target.hidden_size)).astype(np.float32)
            a = algorithm.model.layers[0].attention
            q = ((x * own["attention_norm"]) @ own["qkv"])[:, : a.heads * a.head_dim]
            assert float(own["q_norm"][0]) == pytest.approx(np.sqrt(np.mean(np.square(q))), rel=0.05)
    other = algorithm_of("DFLASH", target, replace(shape, inner=32))
    assert other.first_params(target, np.arange(VOCAB), np.ones(3, np.float32), 0)["layers"][0]["down"].shape[0] == 32


def test_a_small_decoder_gets_the_texts_of_its_target(tmp_path):
    target = target_of(tmp_path / "target")
    texts = {name: name for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja")}
    (target.folder / "additional_chat_templates").mkdir()
    for name, content in texts.items():
        (target.folder / name).write_text(content)
    algorithm = algorithm_of("STANDALONE", target, DraftShape(hidden=32))
    ids = np.arange(target.vocab_size)
    params = algorithm.first_params(target, ids, np.ones(1, np.float32), seed=0)
    algorithm.publish(params, ids, tmp_path / "draft")
    assert {name: (tmp_path / "draft" / name).read_text() for name in texts} == texts


def test_oversized_vocabulary_is_refused_before_answers_are_generated(tmp_path):
    target = target_of(tmp_path / "target")
    with pytest.raises(ConfigError, match=f"--draft-vocab-size must lie between 1 and the target's {VOCAB}"):
        TrainingRun(TrainConfig(model_path=str(target.folder), draft_vocab_size=VOCAB + 1), target.folder)


def test_flags_become_a_configuration_and_back():
    import tyro

    config = TrainConfig(data=("a", "b"), temperature=(0.0, 0.7), aux_layers=(1, 2, 3), tokens=5)
    assert tyro.cli(TrainConfig, args=to_argv(config)) == config


def test_shapes_of_a_head(tmp_path):
    target = target_of(tmp_path)
    assert algorithm_of("EAGLE3", target, DraftShape()).model.layers[0].mlp.width == 96
    assert len(algorithm_of("EAGLE3", target, DraftShape(layers=3)).model.layers) == 3
    assert len(algorithm_of("STANDALONE", target, DraftShape()).model.layers) == 4
    assert algorithm_of("STANDALONE", target, DraftShape(hidden=32)).model.hidden_size == 32
    with pytest.raises(ConfigError, match="multiple of 64"):
        algorithm_of("STANDALONE", target, DraftShape(hidden=100))
    with pytest.raises(ConfigError, match="single layer"):
        algorithm_of("NEXTN", target, DraftShape(layers=2))


def test_head_of_another_width_is_trained_with_its_own_embedding(tmp_path):
    target = target_of(tmp_path / "target")
    config, tensors = eagle3(target.folder, hidden=32, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    head = write_head(tmp_path / "head", config, tensors)
    rng = np.random.default_rng(0)
    store = store_of(tmp_path / "answers", [random_record(rng, 20, 4) for _ in range(4)])
    flags = TrainConfig(
        model_path=str(target.folder), initial=str(head), steps=1, unroll=2, batch_tokens=60, evaluate=0
    )
    learning = TrainingRun(flags, target.folder)
    learning.run(store, tmp_path / "checkpoint", {})
    np.testing.assert_allclose(learning.target_weights().embed, tensors["embed_tokens.weight"], rtol=1e-2)
    learning.publish(tmp_path / "draft")
    again = safetensors.numpy.load_file(tmp_path / "draft" / "model.safetensors")
    np.testing.assert_array_equal(again["embed_tokens.weight"], tensors["embed_tokens.weight"])
    assert again["fc.weight"].shape == (32, 3 * 48)


def test_training_goes_on_from_a_checkpoint_s_own_mtp_layer(tmp_path):
    """With experts, whose router's bias stays; the result is read, and drafts, as the published layer."""
    target = read_target(write_mtp(tmp_path / "target", "glm-4.5"))
    rng = np.random.default_rng(0)
    records = [random_record(rng, 20, 4, states=1) for _ in range(4)]
    flags = TrainConfig(
        model_path=str(target.folder), initial=str(target.folder), algorithm="NEXTN", steps=1, unroll=2,
        batch_tokens=60, evaluate=0, learning_rate=1e-2, draft_vocab_size=64,
    )  # fmt: skip
    learning = TrainingRun(flags, target.folder)
    learning.run(store_of(tmp_path / "answers", records), tmp_path / "checkpoint", {})
    learning.publish(tmp_path / "draft")
    first = safetensors.numpy.load_file(target.folder / "model.safetensors")
    again = safetensors.numpy.load_file(tmp_path / "draft" / "model.safetensors")
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    copies = ("layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight")
    assert again.keys() == {n for n in first if n.startswith("model.layers.3.") and not n.endswith(copies)}
    np.testing.assert_array_equal(again[bias], first[bias])
    for name in ("eh_proj.weight", "mlp.experts.3.down_proj.weight", "mlp.gate.weight"):
        moved = np.abs(again[f"model.layers.3.{name}"].astype(np.float32) - first[f"model.layers.3.{name}"])
        assert 1e-3 < moved.max() < 0.1
    scores = replay("NEXTN", tmp_path / "draft", target.folder, records[:1], CHAIN)
    assert scores[0.0].accept_length >= 1
