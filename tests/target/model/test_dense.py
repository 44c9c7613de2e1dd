"""Dense decoders that are read without `transformers` are the ones that it reads; all others are left to it."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.config import TargetConfig
from outrider.drafts import DEFAULT_HEAD
from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.scheduler import Chunk
from outrider.serving.session import Session
from services.target.kernels.cpu import library
from services.target.model.dense.load import load_dense
from services.target.model.eagle_head_weights import read_eagle_head
from services.target.model.loading.load import load
from services.target.step.batch import SessionWork, build
from tests.support.target.driving import opening
from tests.support.tiny import EOS, write_model

pytestmark = pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CASES = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "heads of the usual width": ("llama", {"head_dim": None}),
    "biases": ("llama", {"attention_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"head_dim": 12}),
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "eos_token_id": [EOS, 9]}),
}


def flags(**more):
    return TargetConfig(**({"device": "cpu", "dtype": "float32"} | more))


def logits(model):
    """Of some tokens at once, [n, vocabulary]."""
    tokens = list(range(3, 60))
    prefix = PrefixCache(PageAllocator(4, 16), enabled=False)
    session = Session(opening(0, tokens), prefix)
    session.table.reserve(len(tokens))
    works = [SessionWork(Chunk(session, 0, len(tokens)))]
    with torch.inference_mode():
        return model.runner.forward(build(works, model.device), model.new_cache(4, 16)).logits


def facts(model):
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.name != "runner"}


def random_biases(folder):
    """Biases are zeros in a new model."""
    file = folder / "model.safetensors"
    tensors = {
        name: torch.randn_like(tensor) if name.endswith("bias") else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("name", CASES)
def test_a_decoder_is_the_one_that_transformers_loads(name, tmp_path):
    family, options = CASES[name]
    folder = write_model(tmp_path, family, **options)
    random_biases(folder)
    for dtype in ("float32", "bfloat16"):
        expected, found = (way(folder, flags(dtype=dtype)) for way in (load, load_dense))
        assert facts(found) == facts(expected)
        assert torch.equal(logits(found), logits(expected))
        assert found.runner.weights() == expected.runner.weights()
        assert found.runner.weight_bytes == expected.runner.weight_bytes


def test_the_bundled_head_has_the_rotary_embedding_of_transformers():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    facts = json.loads((DEFAULT_HEAD / "config.json").read_text())
    names = set(facts) & {"hidden_size", "num_attention_heads", "head_dim", "rope_theta", "rope_parameters"}
    rotary = LlamaRotaryEmbedding(LlamaConfig(**{name: facts[name] for name in names}))
    expected = rotary(torch.empty(0), torch.arange(512)[None])
    found = read_eagle_head(DEFAULT_HEAD, 30, 576, 49152, 512).rotary_tables(512)
    for table, whole in zip(found, expected, strict=True):
        assert torch.equal(table, whole[0, :, : table.shape[1]])


def edited(folder, **changes):
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "absent"}))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2"}, {"architectures": ["LlamaModel"]}, {"quantization_config": {"quant_method": "fp8"}},
        {"hidden_act": "gelu"}, {"mlp_bias": True}, {"layer_types": ["sliding_attention"] * 2},
        {"eos_token_id": "absent"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, {"rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rope_parameters": "absent"}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rms_norm_eps": None}, {"num_hidden_layers": 3}, {"vocab_size": True}, {"dtype": "float8_e4m3fn"},
        {"attention_bias": True}, {"auto_map": {"AutoModelForCausalLM": "own.py"}}, {"rope_theta": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_other_settings_are_left_to_transformers(changes, plain, tmp_path):
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert load_dense(tmp_path, flags()) is not None
    edited(tmp_path, **changes)
    assert load_dense(tmp_path, flags()) is None


@pytest.mark.parametrize("more", [{"deterministic": True}, {"attention_backend": "torch_native"}])
def test_flags_that_ask_for_other_ways_are_left_to_transformers(more, plain):
    assert load_dense(plain, flags(**more)) is None


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_windows_are_left_to_transformers(family, tmp_path):
    window = {} if family == "mistral" else {"use_sliding_window": True, "max_window_layers": 0, "head_dim": 12}
    folder = write_model(tmp_path, family, sliding_window=8, **window)
    assert load_dense(folder, flags()) is None


def test_tensors_that_are_missing_or_too_many_are_left_to_transformers(plain, tmp_path):
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for changed in (tensors | {"model.spare": torch.zeros(2)}, dict(list(tensors.items())[1:])):
        save_file(changed, file, {"format": "pt"})
        assert load_dense(tmp_path, flags()) is None
    with pytest.raises(ConfigError, match="lacks tensors"):  # the message is that of the other way
        load(tmp_path, flags())


def test_the_target_starts_without_transformers(plain):
    heavy = ("transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy", "scipy", "triton")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from outrider.config import TargetConfig\n"
        "from services.target.process import app\n"
        "from services.target.process.control import Control\n"
        f"folder, config = Path({str(plain)!r}), TargetConfig(device='cpu', max_total_tokens=256)\n"
        "Control(app.build_engine(folder, config), folder)\n"
        "from outrider.drafts import DEFAULT_HEAD\n"
        "from services.target.model.eagle_head_weights import read_eagle_head\n"
        "read_eagle_head(DEFAULT_HEAD, 30, 576, 49152, 512).rotary_tables(512)\n"
        f"print(sorted(set({heavy}) & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
