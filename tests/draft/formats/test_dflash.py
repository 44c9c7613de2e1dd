"""Published block drafters: every layout gives the same parameters, and unsupported ones are refused with a reason."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load

from outrider.errors import ConfigError
from services.draft.formats.dflash import default_layers, read_dflash
from services.draft.formats.target import read_target
from tests.support.checkpoints.blocks import MASK, SECOND, dflash
from tests.support.checkpoints.heads import write_head
from tests.support.tiny import VOCAB, write_model, write_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("target"), num_hidden_layers=8, tie_word_embeddings=False)
    return write_tokenizer(folder)


def read(folder, target, config, tensors):
    return read_dflash(write_head(folder, config, tensors), read_target(target))


def test_every_layout_is_the_same(tmp_path, target):
    config, tensors = dflash(target, states=(1, 3, 5))
    plain = read(tmp_path / "plain", target, config, tensors)
    assert plain.features.layers == (2, 4, 6)  # the inputs of the layers behind
    assert not plain.features.final
    np.testing.assert_array_equal(load(plain.fusion)["fc.weight"], tensors["fc.weight"])
    assert (plain.config.head.size, plain.config.head.mask_token) == (8, MASK)
    assert plain.config.head.causal == (False, False)
    own = config.pop("dflash_config")
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    copies = {"lm_head.weight": np.zeros((VOCAB, 48), np.float32)}
    layouts = {"flat": (config | own, tensors), "prefixed": (config | {"dflash_config": own}, prefixed | copies)}
    for name, made in layouts.items():
        draft = read(tmp_path / name, target, *made)
        assert draft.config == plain.config
        pairs = zip(*map(jax.tree.leaves, (draft.load(jnp.float32), plain.load(jnp.float32))), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)


def test_defaults_of_a_configuration(tmp_path):
    """As SGLang: states by the number of layers, 16 positions, and a mask token that is added behind the vocabulary."""
    target = write_tokenizer(write_model(tmp_path / "target", num_hidden_layers=8, vocab=VOCAB + 8))
    config, tensors = dflash(target, layers=3, states=(1, 3, 5))
    for key in ("block_size", "layer_types", "num_target_layers", "dflash_config"):
        del config[key]
    draft = read(tmp_path / "draft", target, config, tensors)
    assert draft.features.layers == (2, 4, 6)
    assert draft.config.head.size == 16
    assert draft.config.head.mask_token == VOCAB
    named = read(tmp_path / "named", target, config | {"dflash_config": {"mask_token": "<|end|>"}}, tensors)
    assert 0 < named.config.head.mask_token < 4
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)  # of Qwen3-8B's
    assert default_layers(30, 1) == (15,)


WRONG = [
    ({"projector_type": "domino"}, "has projector_type, which is not of the DFlash drafters"),
    ({"conv_kernel_size": 2, "conv_group_size": 5}, "groups of 5 of 48 channels"),
    ({"conv_group_size": 16}, "lacks 'conv_kernel_size'"), ({"selector_top_k": 4}, "lacks 'selector_rank'"),
    ({"conv_kernel_size": 2, "conv_group_size": 16}, "lacks 8 tensors of a DFlash drafter"),
    ({"sample_from_anchor": False}, "has sample_from_anchor"),
    ({"block_size": 1}, "has a block_size of 1; from 2 to 64"), ({"block_size": 65}, "has a block_size of 65"),
    ({"mask_token_id": VOCAB}, f"has the mask token {VOCAB}, but the target's embedding has {VOCAB} rows"),
    ({"target_layer_ids": [3, 1, 5]}, "names target layers [3, 1, 5] of 8; they must ascend"),
    ({"target_layer_ids": [1, 3, 8]}, "names target layers [1, 3, 8] of 8"),
    ({"target_layer_ids": [1, 3]}, "fc.weight has shape [48, 144]"),
    ({"num_target_layers": 36}, "made for a target of 36 layers"), ({"hidden_size": 64}, "made for another target"),
    ({"layer_types": ["full_attention"]}, "has layer_types"), ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"layer_types": ["sliding_attention"] * 2}, "lacks 'sliding_window'"),
    ({"dflash_config": 5}, "dflash_config is 5; it must be an object"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "what"), WRONG)
def test_what_does_not_fit_is_refused(tmp_path, target, change, what):
    config, tensors = dflash(target, states=(1, 3, 5))
    inner = {key: change.pop(key) for key in tuple(change) if key in config["dflash_config"]}
    config["dflash_config"] |= inner
    with pytest.raises(ConfigError) as raised:
        read(tmp_path / "draft", target, config | change, tensors)
    assert what in str(raised.value)


def test_missing_and_unknown_tensors_are_named(tmp_path, target):
    config, tensors = dflash(target, states=(1, 3, 5))
    fewer = {name: tensor for name, tensor in tensors.items() if name != "hidden_norm.weight"}
    with pytest.raises(ConfigError, match=r"lacks 1 tensors of a DFlash drafter: hidden_norm\.weight"):
        read(tmp_path / "fewer", target, config, fewer)
    more = tensors | {"candidate_selector.hidden_projection.weight": np.zeros((4, 48), np.float32)}
    with pytest.raises(ConfigError, match="has 1 tensors that a DFlash drafter does not have: candidate_selector"):
        read(tmp_path / "more", target, config, more)


def test_the_second_format(tmp_path, target):
    """Codebooks are published without the suffix of other weights; some tools add it."""
    config, tensors = dflash(target, states=(1, 3, 5), **SECOND)
    draft = read(tmp_path / "draft", target, config | {"architectures": ["DFlash2DraftModel"]}, tensors)
    assert (draft.config.head.selector, draft.config.head.group) == (6, 16)
    named = {f"{name}.weight" if name.endswith("codebook") else name: tensor for name, tensor in tensors.items()}
    params = draft.load(jnp.float32)
    pairs = zip(
        *map(jax.tree.leaves, (read(tmp_path / "named", target, config, named).load(jnp.float32), params)), strict=True
    )
    assert all(np.array_equal(a, b) for a, b in pairs)
    np.testing.assert_array_equal(params["selector_next"], tensors["candidate_selector.successor_codebook"])
