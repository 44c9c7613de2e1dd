"""Models that are read from GGUF files in the number formats of their tensors: the same numbers, and the same model."""

import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from gguf import GGMLQuantizationType as Type

from outrider.checkpoints import checkpoint
from outrider.checkpoints.gguf.record import RECORD, read_record
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import PackedWeight
from services.target.model.dense.load import folder_of
from services.target.model.eagle_head import EagleHead
from services.target.model.eagle_head_weights import read_eagle_head
from services.target.model.gguf import convert
from services.target.model.gguf.weights import GgufWeights
from services.target.model.loading import support
from services.target.model.loading.load import load
from services.target.model.loading.probe import module_without_weights
from services.target.model.native import ProgramRunner
from services.target.process.control import Control
from services.target.process.service import describe
from services.target.step.programs import DraftTokenValue
from tests.support.checkpoints.families import FAMILIES, write_family
from tests.support.checkpoints.ggufs import write_gguf
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.target.greedy_text import NEW, PROMPT, check_text, logits_of
from tests.support.target.self_speculation import drafting
from tests.support.tiny import VOCAB, write_model

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine"),
]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.12}  # rows of whole blocks


def mixed(most: Type, values: Type, embedding: Type | None = None):
    """As llama.cpp's mixtures: values and down projections have another type, and the head that of the embedding."""

    def kind(name):
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return embedding or Type.F32
        if not name.endswith("_proj.weight"):
            return Type.F32
        return values if ".v_proj." in name or ".down_proj." in name else most

    return kind


CASES = {
    "llama, tied, Q4_K and Q6_K": ("llama-2", mixed(Type.Q4_K, Type.Q6_K, Type.Q6_K), {"tie_word_embeddings": True}),
    "llama, Q4_0 and F16": ("llama-2", mixed(Type.Q4_0, Type.F16, Type.Q8_0), {}),
    "qwen2.5, Q5_0 and Q8_0": ("qwen2.5", mixed(Type.Q5_0, Type.Q8_0, Type.Q8_0), {}),
    "qwen2.5, tied, Q4_1 and Q5_1": ("qwen2.5", mixed(Type.Q4_1, Type.Q5_1), {"tie_word_embeddings": True}),
    "qwen3, Q5_K and Q6_K": ("qwen3", mixed(Type.Q5_K, Type.Q6_K, Type.Q5_K), {"head_dim": 64}),
    "gemma-3, Q8_0": ("gemma-3", mixed(Type.Q8_0, Type.Q8_0, Type.Q8_0),
                      {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
}  # fmt: skip


def _unsharded():
    return {name: replace(family, shards=False) for name, family in FAMILIES.items()}


@pytest.fixture(autouse=True)
def unsharded(monkeypatch):
    monkeypatch.setattr("tests.support.checkpoints.families.FAMILIES", _unsharded())


def written(tmp_path, family, kind, changes):
    """A description of a GGUF file, and a checkpoint of what the file stands for, in float32."""
    folder = write_family(tmp_path / "original", family, **(WIDE | changes))
    write_gguf(tmp_path / "it.gguf", folder, tmp_path / "plain", kind, dtype=torch.float32)
    assert convert.main([str(tmp_path / "it.gguf"), str(tmp_path / "described"), "--describe"]) == 0
    return tmp_path / "described", tmp_path / "plain"


def opened(folder, *, kept=True):
    """The weights of a description, and the model's modules."""
    settings, _ = support.read_settings(folder, False)
    module = module_without_weights(settings, torch.bfloat16)
    return GgufWeights(read_record(folder), module, kept=kept), module


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_has_the_numbers_of_the_file(case, tmp_path):
    described, plain = written(tmp_path, *CASES[case])
    source, module = opened(described)
    tensors = safetensors.torch.load_file(plain / "model.safetensors")
    assert {name for name, _ in module.named_parameters()} == tensors.keys()
    for name, expected in tensors.items():
        own = source.number_format(name)
        if own is None:
            found = source.plain(name)
            wanted = expected if expected.ndim == 1 else expected.bfloat16()
            assert torch.equal(found, wanted), name
            continue
        outputs, inputs = expected.shape
        packed = own.new(outputs, inputs)
        source.pack(name, packed, torch.arange(outputs))
        assert torch.equal(packed.dequantized(), expected), name
        assert torch.equal(source.rows(name, 3, 40), expected[3:40].bfloat16()), name


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_that_of_its_numbers(case, tmp_path):
    """Its activations have 8 bits, so logits are compared with those of the numbers in float32 by their spread."""
    described, plain = written(tmp_path, *CASES[case])
    model = loaded(described)
    assert isinstance(model.runner, ProgramRunner)
    assert model.dtype == torch.bfloat16
    found, expected = (logits_of(one) for one in (model, load_model(plain)))
    assert (found - expected).std() < 0.06 * expected.std()
    check_text(model, run(engine_of(model), [opening(1, PROMPT, max_tokens=NEW)]).new[1])


def loaded(folder, **flags):
    return load(folder, TargetConfig(device="cpu", **({"self_speculation": "off"} | flags)))


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    """A tied Llama in Q4_K and Q6_K."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.checkpoints.families.FAMILIES", _unsharded())
        return written(tmp_path_factory.mktemp("tied"), *CASES["llama, tied, Q4_K and Q6_K"])[0]


def test_flags_that_ask_for_another_format_get_it(described, tmp_path):
    """As the converted checkpoint gives them, without a conversion."""
    assert convert.main([str(read_record(described).file), str(tmp_path / "full")]) == 0
    for flags in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"quantization": "int4"}):
        ours, theirs = (loaded(folder, **flags) for folder in (described, tmp_path / "full"))
        assert not ours.kinds
        assert torch.equal(logits_of(ours), logits_of(theirs)), flags
        assert ours.runner.weights() == theirs.runner.weights()


def test_an_embedding_that_is_the_head_is_in_memory_once(described):
    model = loaded(described)
    assert model.kinds == {"Q4_K": 15, "Q6_K": 7}
    assert model.runner.weight_bytes < 1.1 * sum(
        tensor.bytes for tensor in read_record(described).tensors.values() if tensor.kind != "F32"
    )
    packed = [one for one in model.runner.program.kept if isinstance(one, PackedWeight)]
    assert sum((one.outputs, one.inputs) == (VOCAB, 256) for one in packed) == 2  # one object, read twice
    assert len({id(one) for one in packed if one.outputs == VOCAB}) == 1


def test_weights_in_formats_of_their_file_are_not_replaced(described, tmp_path):
    engine = engine_of(loaded(described))
    control = Control(engine, described, roots=[str(tmp_path)])
    write_model(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"formats of their file \(Q4_K, Q6_K\).*--dtype bfloat16"):
        control.read_folder(str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="cannot be replaced"), control.incoming():
        pass
    info = describe(described, engine, TargetConfig()).info
    assert info.model.fingerprint == checkpoint.fingerprint(described)
    assert dict(info.weight_formats) == {"Q4_K": 15, "Q6_K": 7}


def test_a_copy_of_weights_that_are_narrow_is_refused_and_not_made_by_default(described):
    with pytest.raises(ConfigError, match=r"--self-speculation quantized: the weights of the file have 5\.\d bits"):
        loaded(described, self_speculation="quantized")
    assert not loaded(described, self_speculation="auto").copied


def test_a_head_reads_the_packed_embedding(described, tmp_path):
    """It drafts the same with the numbers of the embedding as a plain table, and texts are those without it."""
    folder = write_head(tmp_path / "head", *eagle3(described, eagle_aux_hidden_state_layer_ids=[-1, 1, 2]))
    head = read_eagle_head(folder, 3, 256, VOCAB, 512)
    model = loaded(described, self_speculation="head", self_speculation_head=str(folder))
    requests = [opening(1, PROMPT, max_tokens=NEW)]
    assert run(drafting(model), requests).new == run(engine_of(loaded(described)), requests).new
    packed = next(one for one in model.head.program.kept if isinstance(one, PackedWeight) and one.outputs == VOCAB)
    runner = model.runner
    plain = EagleHead(
        head,
        runner.program,
        runner.threads,
        packed.dequantized(),
        model.dtype,
        model.cache_dtype,
        3,
        model.context_length,
    )
    first, second = ([], [])
    for engine, found in ((drafting(model), first), (drafting(replace(model, head=plain)), second)):
        source = engine.speculation.chooser.source
        draft = source.draft_tokens
        free = DraftTokenValue(next=1.0, token=1.0, row=0.0, step=0.0)  # no length depends on measured times
        source.estimates.token_value = lambda *_, free=free: free
        source.draft_tokens = lambda *args, draft=draft, found=found: found.append(draft(*args)) or found[-1]
        run(engine, requests)
    assert first
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.tokens == theirs.tokens).all()
        assert (ours.probabilities == theirs.probabilities).all()


def test_it_is_batch_invariant(described):
    """As --deterministic checks at the start."""
    model = loaded(described, deterministic=True)
    assert isinstance(model.runner, ProgramRunner)


@pytest.mark.parametrize(("change", "message"), [
    (lambda tensors: tensors.pop("blk.1.attn_q.weight"), "lacks tensors that the model needs: .*1.self_attn.q_proj"),
    (lambda tensors: tensors.update(spare=tensors["blk.0.attn_q.weight"]), "does not read, such as spare"),
    (lambda tensors: tensors.update({"blk.0.attn_q.weight": tensors["blk.0.ffn_up.weight"]}), "of the wrong shape"),
])  # fmt: skip
def test_missing_spare_and_misshapen_tensors_are_named(change, message, described, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(described, folder)
    facts = json.loads((folder / RECORD).read_text())
    change(facts["tensors"])
    (folder / RECORD).write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=message):
        loaded(folder)


def test_a_file_that_has_changed_or_is_gone_is_named(described, tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(described, folder)
    facts = json.loads((folder / RECORD).read_text())
    for name, size, message in (("gone", facts["bytes"], "is gone"), (facts["file"], 17, "instead of 17")):
        (folder / RECORD).write_text(json.dumps(facts | {"file": str(name), "bytes": size}))
        with pytest.raises(ConfigError, match=message):
            loaded(folder)


def test_only_models_with_a_program_are_read_from_the_file(described, tmp_path, monkeypatch):
    asked = []
    file = str(read_record(described).file)
    monkeypatch.setattr(checkpoint, "resolve", lambda path, **how: asked.append(how) or described)
    for flags in ({}, {"quantization": "int4"}, {"dtype": "float32"}, {"attention_backend": "torch_native"}):
        folder_of(TargetConfig(model_path=file, device="cpu", **flags))
    assert asked == [*[{"description": True}] * 4, {"whole": True}]
