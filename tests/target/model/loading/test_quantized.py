"""Published quantized checkpoints: on the CPU they are unpacked as they load; the text is that of the plain weights."""

import json
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.model.loading import quantized
from services.target.model.loading import weight_quantization as narrow_module
from services.target.model.loading.load import load
from services.target.process.service import describe
from tests.support.checkpoints import quantizers
from tests.support.checkpoints.families import add_tensors, write_family
from tests.support.checkpoints.quantizers import GROUP, write_quantized
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, greedy
from tests.support.tiny import write_model

needs_kernels = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq", "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def compressed(layout, **weights):
    group = {"weights": {"symmetric": True, "strategy": "group", "group_size": GROUP} | weights, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "ignore": ["lm_head"], "config_groups": {"group_0": group}}  # fmt: skip


CASES = {
    "fp8-blocks": ("deepseek-v3", quantizers.fp8(20), FP8 | {"weight_block_size": [20, 20]}),
    "fp8-exponents": ("llama-2", quantizers.fp8(20, exponents=True), FP8 | {"weight_block_size": [20, 20]}),
    "fp8-one-scale": ("llama-2", quantizers.fp8(None), FP8),
    "fp8-auto": ("llama-2", quantizers.fp8_auto, FP8 | {"activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "gptq-4-bits": ("llama-2", quantizers.gptq(4, symmetric=True), GPTQ | {"bits": 4}),
    "gptq-3-bits": ("llama-2", quantizers.gptq(3, symmetric=True), GPTQ | {"bits": 3}),
    "gptq-8-bits-v2": (
        "qwen2.5", quantizers.gptq(8, symmetric=False, v2=True), GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}
    ),
    "gptq-by-activation": (
        "qwen2.5", quantizers.gptq(4, symmetric=False, shuffled=True),
        GPTQ | {"bits": 4, "desc_act": True, "sym": False},
    ),
    "gptq-experts": ("qwen3-moe", quantizers.gptq(4, symmetric=True), GPTQ | {"bits": 4}),
    "awq": ("qwen2.5", quantizers.awq, AWQ),
    "awq-experts": ("qwen3-moe", quantizers.awq, AWQ),
    "pack-quantized": (
        "llama-2", quantizers.pack_quantized(4, symmetric=True), compressed("pack-quantized", num_bits=4),
    ),
    "pack-quantized-zeros": (
        "llama-2", quantizers.pack_quantized(4, symmetric=False),
        compressed("pack-quantized", num_bits=4, symmetric=False),
    ),
    "int-quantized": ("llama-2", quantizers.int_quantized, compressed("int-quantized", num_bits=8, strategy="channel")),
    "float-quantized": (
        "qwen3-moe", quantizers.float_quantized,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_text_is_that_of_the_plain_weights(case, tmp_path):
    family, quantizer, config = CASES[case]
    torch.manual_seed(1)
    folder, plain = write_family(tmp_path / "quantized", family, hidden_size=64), tmp_path / "plain"
    before = safetensors.torch.load_file(folder / "model.safetensors")
    write_quantized(folder, plain, quantizer, config)
    after = safetensors.torch.load_file(plain / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    error = (after[name] - before[name]).norm() / before[name].norm()
    assert 0 < error < 0.3, "the test's quantizer is at fault"
    model = load_model(folder)
    assert model.dtype == torch.float32
    assert run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1] == greedy(plain)


def test_another_number_format(tmp_path):
    folder = write_family(tmp_path / "quantized", "qwen3-moe")
    write_quantized(folder, tmp_path / "plain", quantizers.gptq(4, symmetric=True), GPTQ | {"bits": 4})
    model = load(folder, TargetConfig(device="cpu", dtype="bfloat16"))
    assert {parameter.dtype for parameter in model.runner.module.parameters()} == {torch.bfloat16}


def mxfp4(weight):
    """[experts, in, out] as blocks of 32 inputs [experts, out, blocks, 16] with a power of two each."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat([numbers, -numbers])
    blocks = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
    nearest = (blocks / exponent.exp2()[..., None])[..., None].sub(numbers).abs().argmin(-1)
    plain = (numbers[nearest] * exponent.exp2()[..., None]).flatten(2).transpose(1, 2)
    packed = (nearest[..., ::2] | nearest[..., 1::2] << 4).to(torch.uint8)
    return packed, (exponent + 127).to(torch.uint8), plain


def test_mxfp4_experts(tmp_path):
    folder = write_family(tmp_path / "quantized", "gpt-oss", hidden_size=64)
    config = json.loads((folder / "config.json").read_text())
    stored, plain = {}, {}
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], plain[name] = mxfp4(tensor)
        else:
            stored[name] = plain[name] = tensor
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text(json.dumps(config))
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path, tensors in ((folder, stored), (tmp_path / "plain", plain)):
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, path / "model.safetensors", {"format": "pt"})
    model = load_model(folder)
    assert run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1] == greedy(tmp_path / "plain")


@pytest.mark.parametrize(("config", "message"), [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes need --device cuda; choose"),
    ({"quant_method": "torchao"}, r"torchao need --device cuda; choose"),
    ({"quant_method": "aqlm"}, r"quantized by aqlm are not supported; choose"),
    (AWQ | {"version": "exllama"}, r"AWQ weights of version exllama.*choose"),
    (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, r"GPTQ weights in the format marlin.*choose"),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float"), r"nvfp4-pack-quantized are not supported; choose"),
])  # fmt: skip
def test_formats_that_cannot_be_unpacked_are_rejected(config, message, tmp_path):
    folder = write_family(tmp_path / "model", "llama-2")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message):
        load_model(folder)


def test_scales_of_activations_are_refused(tmp_path):
    """As in AWQ checkpoints of StarCoder2; a model without them generates wrong text."""
    folder = write_family(tmp_path / "model", "llama-2")
    quantizers.write_quantized(folder, tmp_path / "plain", quantizers.awq, AWQ)
    add_tensors(folder, {"model.layers.0.mlp.act.scales": torch.ones(96)})
    with pytest.raises(ConfigError, match=r"mlp\.act\.\w+ scales what an activation gives.*choose a checkpoint"):
        load_model(folder)


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(quantized, "_installed", lambda package: False)
    settings = type("Settings", (), {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})()
    settings.get_text_config = lambda: settings
    with pytest.raises(ConfigError, match="pip install bitsandbytes"):
        quantized.prepare(settings, torch.device("cuda"))


def test_eight_bits_without_scales_are_refused(tmp_path, caplog):
    folder = write_family(tmp_path / "quantized", "llama-2")
    write_quantized(folder, tmp_path / "plain", quantizers.fp8(None), FP8)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    kept = {name.replace("weight_scale_inv", "scale_of_another_format"): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(folder)
    assert "scale" in caplog.text


def test_scales_that_do_not_fit_are_refused(tmp_path, caplog):
    folder = write_family(tmp_path / "quantized", "llama-2")
    write_quantized(folder, tmp_path / "plain", quantizers.fp8(20), FP8 | {"weight_block_size": [32, 32]})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_model(folder)
    assert "do not match blocks of 32" in caplog.text


# --- --quantization ---


def narrow(monkeypatch, choice, installed=(), capability=(9, 0), stored=None, device="cuda:0"):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(narrow_module.importlib.util, "find_spec", lambda name: name if name in installed else None)
    settings = SimpleNamespace(quantization_config=stored)
    settings.get_text_config = lambda: settings
    return narrow_module.quantization_arguments(choice, settings, torch.device(device))


@pytest.mark.parametrize(("choice", "circumstances", "message"), [
    ("fp8", {"device": "cpu"}, r"--quantization fp8 needs a CUDA device, not cpu; choose int8 or int4"),
    ("int8", {}, r"--quantization int8 needs torchao; `pip install torchao`"),
    ("int4", {"installed": ["torchao"]}, r"--quantization int4 needs mslk; `pip install mslk`"),
    ("fp8", {"capability": (8, 0)}, r"--quantization fp8 needs a GPU of compute capability 8\.9 or more; choose int8"),
    ("fp8", {"stored": AWQ}, r"--quantization fp8: the checkpoint is quantized already"),
])  # fmt: skip
def test_narrower_weights_that_cannot_be(choice, circumstances, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        narrow(monkeypatch, choice, **circumstances)


@needs_kernels
def test_published_weights_are_packed_again_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(quantizers, "GROUP", 32)
    folder, plain = write_family(tmp_path / "quantized", "qwen2.5", hidden_size=64), tmp_path / "plain"
    write_quantized(folder, plain, quantizers.awq, AWQ | {"group_size": 32})
    config = TargetConfig(device="cpu", dtype="float32", quantization="int4")
    published, unpacked = (load(path, config) for path in (folder, plain))
    assert published.runner.weight_bytes == unpacked.runner.weight_bytes < load_model(folder).runner.weight_bytes / 3
    texts = [run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1] for model in (published, unpacked)]
    assert texts[0] == texts[1]


def test_weights_are_left_alone_without_the_flag(monkeypatch):
    assert narrow(monkeypatch, None, device="cpu") == {}


@needs_kernels
@pytest.mark.parametrize("choice", ["int8", "int4"])
def test_float16_with_narrower_weights_is_bfloat16_on_a_cpu(choice, tmp_path):
    config = TargetConfig(device="cpu", dtype="float16", quantization=choice)
    model = load(write_model(tmp_path), config)
    assert model.dtype == torch.bfloat16
    info = describe(tmp_path, engine_of(model), config).info  # what the targets of a pool must have in common
    assert (info.model.dtype, info.quantization) == ("bfloat16", choice)


@needs_kernels
@pytest.mark.parametrize(("family", "reported"), [("qwen3-moe", True), ("granite", False)])
def test_unquantized_experts_are_warned_of(family, reported, tmp_path, caplog):
    folder = write_family(tmp_path, family)
    load_model(folder)
    assert "experts" not in caplog.text
    load_model(folder, quantization="int8")
    assert ("--quantization int8 leaves experts as they are; they take" in caplog.text) == reported
