"""GPTQ, AWQ and compressed-tensors checkpoints on a CPU: weights keep their width where a format holds them exactly."""

import pytest
import safetensors.torch
import torch

from outrider.config import TargetConfig
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format
from services.target.model.loading import load as loading
from services.target.model.loading import quantized, support
from services.target.model.loading.probe import module_without_weights
from services.target.model.stored.checkpoint import QuantizedWeights
from tests.support.checkpoints import quantizers
from tests.support.checkpoints.families import write_family
from tests.support.checkpoints.quantizers import AWQ, GPTQ, write_quantized
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, check_text

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
ZEROS = {"num_bits": 4, "symmetric": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}


def by_groups(settings, group, **weights):
    """The configuration of compressed-tensors with groups."""
    scheme = {"symmetric": True, "strategy": "group", "group_size": group} | weights
    return settings | {"config_groups": {"group_0": {"weights": scheme, "targets": ["Linear"]}}}


# Group, quantizer and configuration; and the kernels' format.
CASES = {
    "gptq, symmetric": (32, quantizers.gptq(4, symmetric=True), GPTQ | {"bits": 4}, Format.SYMMETRIC4),
    "gptq, zero points": (64, quantizers.gptq(4, symmetric=False), GPTQ | {"bits": 4}, Format.K4),
    "gptq, 8 bits": (32, quantizers.gptq(8, symmetric=True), GPTQ | {"bits": 8}, Format.SYMMETRIC8),
    "gptq, 8 bits, zero points": (32, quantizers.gptq(8, symmetric=False), GPTQ | {"bits": 8}, None),
    "gptq, 3 bits": (64, quantizers.gptq(3, symmetric=True), GPTQ | {"bits": 3}, None),
    "gptq, by activation": (
        64, quantizers.gptq(4, symmetric=True, shuffled=True), GPTQ | {"bits": 4, "desc_act": True}, None,
    ),
    "awq": (128, quantizers.awq, AWQ, Format.K4),
    "awq, small groups": (16, quantizers.awq, AWQ, None),
    "packed": (32, quantizers.pack_quantized(4, symmetric=True), by_groups(PACKED, 32, num_bits=4), Format.SYMMETRIC4),
    "packed, zero points": (
        64, quantizers.pack_quantized(4, symmetric=False), by_groups(PACKED, 64, **ZEROS), Format.K4,
    ),
    "int8 by rows": (32, quantizers.int_quantized, by_groups(INT8, None, num_bits=8, strategy="channel"), Format.INT8),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_weights_keep_their_numbers(case, tmp_path, monkeypatch):
    group, quantize, config, number_format = CASES[case]
    monkeypatch.setattr(quantizers, "GROUP", group)
    config = config | ({"group_size": group} if "group_size" in config else {})
    folder, plain = (
        write_family(tmp_path / "quantized", "qwen2.5", hidden_size=128, intermediate_size=256),
        tmp_path / "plain",
    )
    write_quantized(folder, plain, quantize, config)
    settings, _ = support.read_settings(folder, False)
    module = module_without_weights(settings, torch.bfloat16)
    source = QuantizedWeights(folder, module, quantized.settings_of(settings))
    assert source.complete()
    for name, expected in safetensors.torch.load_file(plain / "model.safetensors").items():
        held = source.number_format(name)
        if held is None:
            assert torch.equal(source.plain(name), expected.bfloat16()), name
            assert number_format is None or "_proj.weight" not in name
        else:
            assert held.number_format == number_format
            packed = held.new(*expected.shape)
            source.pack(name, packed, torch.arange(len(expected)))
            assert torch.equal(packed.dequantized(), expected), name
    model = loading.load(folder, TargetConfig(device="cpu", self_speculation="off"))
    assert model.kinds == (
        {} if number_format is None else {f"{config['quant_method']} int{bits_of(number_format)}": 21}
    )
    if number_format is not None:
        check_text(model, run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1])
        assert load_model(folder).kinds == {}  # --dtype asks for plain weights


def bits_of(number_format):
    return 8 if number_format in (Format.INT8, Format.SYMMETRIC8) else 4
