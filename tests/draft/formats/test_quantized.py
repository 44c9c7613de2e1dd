"""Published quantized weights are read as the dequantized ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch

from outrider.errors import ConfigError
from services.draft.formats.decoders import read_decoder
from services.draft.formats.mtp import read_mtp
from services.draft.formats.target import read_target
from tests.support.checkpoints.mtp import write_mtp
from tests.support.checkpoints.quantizers import AWQ, PUBLISHED, write_quantized
from tests.support.tiny import write_model


def same_params(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_decoder_of_quantized_weights(tmp_path, case):
    quantizer, settings = PUBLISHED[case]
    torch.manual_seed(1)
    folder, plain = write_model(tmp_path / "quantized", hidden_size=64, intermediate_size=96), tmp_path / "plain"
    write_quantized(folder, plain, quantizer, settings)
    same_params(read_decoder(folder).load(jnp.float32), read_decoder(plain).load(jnp.float32))


@pytest.mark.parametrize("case", ["gptq, 4 bits", "awq", "float8, blocks"])
def test_an_mtp_layer_of_a_quantized_target(tmp_path, case):
    quantizer, settings = PUBLISHED[case]
    torch.manual_seed(1)
    folder, plain = write_mtp(tmp_path / "quantized", "glm-4.5", hidden_size=64), tmp_path / "plain"
    write_quantized(folder, plain, quantizer, settings)
    found, expected = (read_mtp(path, read_target(path)).load(jnp.float32) for path in (folder, plain))
    same_params(found, expected)


def test_unsupported_layouts_are_refused(tmp_path):
    quantizer, settings = PUBLISHED["awq"]
    folder = write_model(tmp_path / "quantized", hidden_size=64)
    write_quantized(folder, tmp_path / "plain", quantizer, settings)
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": AWQ | {"version": "gemv"}}))
    with pytest.raises(ConfigError, match="AWQ weights of version gemv are not supported"):
        read_decoder(folder).load(jnp.float32)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(file)
    scales = tensors.pop("model.layers.0.self_attn.q_proj.scales")
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"of model\.layers\.0\.self_attn\.q_proj\.weight do not have the layout .*scales"
    ):
        read_decoder(folder).load(jnp.float32)
    tensors["model.layers.0.self_attn.q_proj.scales"] = scales[:, :8].contiguous()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="do not have the layout of their format"):
        read_decoder(folder).load(jnp.float32)
    safetensors.torch.save_file(tensors | {"model.layers.7.q_proj.qweight": scales}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"does not have: model\.layers\.7\.q_proj\.weight"):
        read_decoder(folder).load(jnp.float32)
