"""GPTQ, AWQ, compressed-tensors and FP8 checkpoints on a CPU: weights keep their width where that is exact."""

import pytest
import safetensors.torch
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format
from services.target.model.loading import load as loading
from services.target.model.loading import quantized, support
from services.target.model.loading.probe import module_without_weights
from services.target.model.stored.checkpoint import QuantizedWeights
from services.target.process.control import Control, Update
from tests.support.checkpoints import quantizers
from tests.support.checkpoints.families import add_tensors, write_family
from tests.support.checkpoints.quantizers import AWQ, FP8, GPTQ, write_quantized
from tests.support.target.controlled import in_parts
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, check_text, logits_of

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
ZEROS = {"num_bits": 4, "symmetric": False}
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
FLOAT = {"quant_method": "compressed-tensors", "format": "float-quantized"}
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
    "fp8, blocks": (128, quantizers.fp8(128), FP8 | {"weight_block_size": [128, 128]}, Format.FLOAT8),
    "fp8, small blocks of powers of two": (
        64, quantizers.fp8(64, exponents=True), FP8 | {"weight_block_size": [64, 64]}, Format.FLOAT8,
    ),
    "fp8, blocks that straddle": (48, quantizers.fp8(48), FP8 | {"weight_block_size": [48, 48]}, None),
    "fp8, static": (128, quantizers.fp8_auto, FP8 | {"activation_scheme": "static"}, Format.FLOAT8),
    "float8 by rows": (
        32, quantizers.float_quantized, by_groups(FLOAT, None, num_bits=8, type="float", strategy="channel"),
        Format.FLOAT8,
    ),
    "float8, one scale": (
        32, quantizers.fp8_auto, by_groups(FLOAT, None, num_bits=8, type="float", strategy="tensor"), Format.FLOAT8,
    ),
}  # fmt: skip


@pytest.mark.sampled(2)
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
    assert model.kinds == ({} if number_format is None else {f"{config['quant_method']} {kind_of(number_format)}": 21})
    if number_format is not None:
        check_text(model, run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1])
        assert load_model(folder).kinds == {}  # --dtype asks for plain weights
    if number_format == Format.FLOAT8:
        wide = load_model(folder, dtype="bfloat16", self_speculation="off")
        found, expected = logits_of(model), logits_of(wide)
        # Weights that bfloat16 holds differ in the order of sums alone; others by its rounding.
        assert (found - expected).std() < (0.02 if "powers" in case else 0.06) * expected.std()
        assert model.runner.weight_bytes < 0.6 * wide.runner.weight_bytes
        if "powers" in case:
            assert (
                run(engine_of(wide), [opening(1, PROMPT, max_tokens=NEW)]).new
                == run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new
            )


def kind_of(number_format):
    if number_format == Format.FLOAT8:
        return "e4m3"
    return "int8" if number_format in (Format.INT8, Format.SYMMETRIC8) else "int4"


def written_fp8(tmp_path):
    """A checkpoint with blocks of 128."""
    folder = write_family(tmp_path / "fp8", "llama-2", hidden_size=128, intermediate_size=256)
    write_quantized(folder, tmp_path / "plain", quantizers.fp8(128), FP8 | {"weight_block_size": [128, 128]})
    return folder


def in_8_bits(weight):
    """Rounded to E4M3, with a scale for each row and 128 inputs."""
    blocks = weight.bfloat16().float().unflatten(1, (-1, 128))
    scales = blocks.abs().amax(2, keepdim=True) / 448
    return ((blocks / scales).to(torch.float8_e4m3fn).float() * scales).flatten(1)


@pytest.mark.parametrize("way", ["tensors", "folder"])
def test_8_bit_floats_are_replaced(way, tmp_path):
    """By plain weights, which are rounded to them. Scales of the file alone would change nothing, and are refused."""
    folder, other = written_fp8(tmp_path), tmp_path / "other"
    write_family(other, "llama-2", hidden_size=128, intermediate_size=256)
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    new = {name: torch.randn_like(one) * one.std() if one.ndim > 1 else one for name, one in tensors.items()}
    safetensors.torch.save_file(new, other / "model.safetensors", {"format": "pt"})
    model = loading.load(folder, TargetConfig(device="cpu", self_speculation="off"))
    control = Control(engine_of(model), folder, roots=[str(tmp_path)])
    before = logits_of(model)
    scales = {"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)}
    with pytest.raises(ConfigError, match="no tensors of these names"):
        in_parts(control, safetensors.torch.save(scales))
    if way == "folder":
        control.update_from_folder(control.read_folder(str(other)), Update())
    else:
        control.update_from_tensors(in_parts(control, safetensors.torch.save(new)), Update())
    assert model.kinds == {"fp8 e4m3": 21}
    rounded = {name: in_8_bits(tensor) if "_proj.weight" in name else tensor for name, tensor in new.items()}
    safetensors.torch.save_file(rounded, other / "model.safetensors", {"format": "pt"})
    expected = logits_of(load_model(other, dtype="bfloat16", self_speculation="off"))
    found = logits_of(model)
    assert (found - expected).std() < 0.06 * expected.std()  # rounding of these weights to bfloat16
    assert (found - before).std() > 0.5 * expected.std()


def test_other_kept_formats_take_no_new_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(quantizers, "GROUP", 64)
    folder = write_family(tmp_path / "gptq", "llama-2", hidden_size=128, intermediate_size=256)
    write_quantized(
        folder, tmp_path / "plain", quantizers.gptq(4, symmetric=False), GPTQ | {"bits": 4, "group_size": 64}
    )
    model = loading.load(folder, TargetConfig(device="cpu", self_speculation="off"))
    assert model.kinds == {"gptq int4": 21}
    with pytest.raises(ConfigError, match="start the target with --dtype bfloat16"):
        Control(engine_of(model), folder, roots=[str(tmp_path)]).read_folder(str(folder))


def without_scales(tensors):
    for name in [name for name in tensors if "0.self_attn.o_proj.weight_scale_inv" in name]:
        del tensors[name]


def with_nan(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF


@pytest.mark.parametrize(("damage", "message"), [
    (with_nan, r"layers\.1\.mlp\.up_proj\.weight has entries that are not numbers \(NaN\); get the checkpoint whole"),
    (without_scales, r"tensors of model\.layers\.0\.self_attn\.o_proj\.weight do not have the layout of their format"),
])  # fmt: skip
def test_damaged_floats_are_refused(damage, message, tmp_path):
    folder = written_fp8(tmp_path)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    damage(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        loading.load(folder, TargetConfig(device="cpu", self_speculation="off"))


def test_scales_of_a_cache_do_not_stand_in_the_way(tmp_path):
    """Nor does --deterministic, which checks that a row does not depend on its batch."""
    folder = written_fp8(tmp_path)
    add_tensors(folder, {"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)})
    model = loading.load(folder, TargetConfig(device="cpu", self_speculation="off", deterministic=True))
    assert model.kinds == {"fp8 e4m3": 21}
