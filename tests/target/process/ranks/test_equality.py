"""Two ranks on the CPU are one: texts, features, caches, sampling and weight updates, with every feature on."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, FeatureSpec
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.engine.launching.prepare import takes_prepared_spans
from services.target.kernels.cpu import library
from services.target.model.cuda.graphs import GraphRunner
from services.target.model.linear import NativeLinear
from services.target.process.control import Control, Update
from services.target.process.weights.group import Announced
from services.target.process.weights.member import Membership
from services.target.step.batch import DeferredRoots, SessionWork, build
from tests.support.checkpoints import quantizers
from tests.support.checkpoints.families import write_family
from tests.support.checkpoints.quantizers import GROUP, write_quantized
from tests.support.gateway.services import free_port
from tests.support.system.trainer import GROUP as TRAINERS
from tests.support.system.trainer import Trainer
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.driving import engine_of, load_model, load_modules, opening, preparing_engine, run
from tests.support.target.features import Reader, configured
from tests.support.target.greedy_text import NEW, PROMPT, check_text, greedy, proposals_near
from tests.support.target.proposals import Drafts
from tests.support.target.rank_pair import SIZES, RankPair
from tests.support.tiny import VOCAB, write_model

GPTQ = {"quant_method": "gptq", "group_size": GROUP, "desc_act": False, "checkpoint_format": "gptq", "sym": True,
        "bits": 4}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [20, 20]}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
          "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "head_dim": 8, "num_key_value_heads": 4}  # fmt: skip


@pytest.fixture(scope="module")
def pair():
    ranks = RankPair()
    yield ranks
    ranks.close()


@torch.inference_mode()
def prompt_logits(model):
    engine = engine_of(model)
    engine.open(opening(1, PROMPT, prompt_logprobs=0))
    (chunk,) = engine.scheduler.plan()
    return model.runner.forward(build([SessionWork(chunk)], model.device), engine.cache).logits.clone()


def near_text(model, expected, **flags):
    """The text with proposals, next to another session; and that proposals are accepted."""
    engine = engine_of(model, page_size=4, chunked_prefill_size=7, speculative_num_draft_tokens=10, **flags)
    sessions = [opening(1, PROMPT, max_tokens=NEW), opening(2, PROMPT[::-1], max_tokens=NEW)]
    result = run(engine, sessions, proposals_near(expected, 4))
    assert result.new[1] == expected
    assert 0 < result.accepted < result.verified


def test_the_text_is_that_of_one_rank_at_every_page_size(pair, tmp_path):
    folder = write_family(tmp_path / "model", "gemma-3")  # tied embeddings, sliding windows
    model = pair.load(folder)
    assert {shape.kv_heads for shape in model.shapes} == {1}  # of two
    check_text(model, greedy(folder))


@pytest.mark.parametrize("family", ["llama-2", "qwen2.5", "qwen3-moe", "deepseek-v3", "glm-4.5", "gpt-oss"])
def test_the_text_of_a_family_is_that_of_one_rank(family, pair, tmp_path, caplog):
    folder = write_family(tmp_path / "model", family)
    near_text(pair.load(folder), greedy(folder))
    if family == "gpt-oss":  # whose plan divides the embedding alone
        assert "--tp-size saves little memory" in caplog.text


def test_each_rank_caches_the_latents_and_divides_the_heads(pair, tmp_path):
    folder = write_model(tmp_path / "model", "deepseek_v2", **LATENT)
    model = pair.load(folder)
    assert {(shape.kv_heads, shape.key_dim, shape.shared) for shape in model.shapes} == {(1, 24, True)}
    near_text(model, greedy(folder))


@pytest.mark.parametrize(("family", "quantizer", "config"), [
    ("qwen3-moe", quantizers.gptq(4, symmetric=True), GPTQ), ("deepseek-v3", quantizers.fp8(20), FP8),
], ids=["gptq", "fp8"])  # fmt: skip
def test_quantized_checkpoints_are_divided(family, quantizer, config, pair, tmp_path):
    torch.manual_seed(1)
    folder = write_family(tmp_path / "quantized", family, hidden_size=64)
    write_quantized(folder, tmp_path / "plain", quantizer, config)
    near_text(pair.load(folder), greedy(tmp_path / "plain"))


def test_fp8_in_whole_blocks_stays_packed(pair, tmp_path):
    torch.manual_seed(1)
    folder = write_family(tmp_path / "quantized", "llama-2", hidden_size=64)
    write_quantized(folder, tmp_path / "plain", quantizers.fp8(16), FP8 | {"weight_block_size": [16, 16]})
    model = pair.load(folder, fp8=True)
    down = model.runner.runner.module.model.layers[1].mlp.down_proj
    assert (down.weight.dtype, tuple(down.weight.shape)) == (torch.float8_e4m3fn, (64, 48))
    near_text(model, greedy(tmp_path / "plain"))


@pytest.mark.skipif(not library.available(), reason="the CPU kernels do not compile on this machine")
@pytest.mark.parametrize("choice", ["int4", "int8"])
def test_quantized_parts_are_as_exact_as_the_whole(choice, pair, tmp_path):
    folder = write_model(tmp_path / "model", hidden_size=64, intermediate_size=128)
    plain, alone = load_modules(folder), load_model(folder, attention_backend="torch_native", quantization=choice)
    divided = pair.load(folder, quantization=choice)
    packed = [layer for layer in divided.runner.runner.module.modules() if isinstance(layer, NativeLinear)]
    assert len(packed) == 2 * 7 + 1
    whole, one, two = (prompt_logits(model) for model in (plain, alone, divided))
    assert 0 < (two - whole).norm() < 1.2 * (one - whole).norm()


def test_features_are_those_of_one_rank(pair, tmp_path):
    folder = write_family(tmp_path / "model", "llama-2")
    states = []
    spec = FeatureSpec((0, 1, 3), final=True, format=FeatureFormat.FLOAT32)
    for model in (load_modules(folder), pair.load(folder)):
        engine = engine_of(model, chunked_prefill_size=7)
        reader = Reader(engine)
        name = configured(engine, spec)
        reader.open(replace(opening(1, PROMPT, max_tokens=NEW), feature_spec=name))
        reader.run(proposals_near(greedy(folder), 1))
        states.append((reader.tokens[1], reader.states(1)))
    assert states[0][0] == states[1][0]
    np.testing.assert_allclose(states[1][1], states[0][1], atol=1e-3)


@pytest.mark.parametrize("as_on_cuda", [True, False])
def test_sampled_texts_are_those_of_one_rank(as_on_cuda, pair, tmp_path):
    """as_on_cuda: steps overlap, and the device walks the trees and moves the rows of accepted nodes."""
    folder = write_model(tmp_path / "model")
    requests = [opening(i, PROMPT[i:], SamplingParams(1.0, seed=i, top_p=0.9), max_tokens=NEW) for i in (1, 2, 3)]
    expected = run(engine_of(load_modules(folder)), requests).new
    engine = engine_of(pair.load(folder), page_size=4)
    sampler = engine.launcher.sampler
    engine.overlap, sampler.walks, sampler.alongside = as_on_cuda, as_on_cuda, not as_on_cuda

    result = run(engine, requests, lambda i, path: ahead(i, path, expected))
    assert result.new == expected
    assert result.accepted > 0


def ahead(session_id, path, expected):
    """Trees whose second branch goes on as the text does, so that accepted rows must move."""
    from outrider.speculation.proposal import Proposal, path_hash

    done = len(path) - (len(PROMPT) - session_id)
    true = expected[session_id][done : done + 3]
    nodes = np.array([(path[-1] + 1) % VOCAB, *true], np.uint32)
    parents = np.array([-1, -1, *range(1, len(true))][: len(nodes)], np.int32)
    if len(nodes) > 1 and nodes[0] == nodes[1]:
        return []
    scores = -np.ones(len(nodes), np.float32)
    return [Proposal(session_id, len(path), path_hash(np.array(path)), nodes, parents, scores)]


def test_fused_and_captured_steps_give_the_text_of_one_rank(pair, tmp_path):
    need_interpreter()
    folder = write_family(tmp_path / "model", "qwen2.5", num_hidden_layers=1)  # with biases and tied embeddings
    model = pair.load(folder, fused=True)
    engine = engine_of(model, page_size=4)
    model.runner.capture(engine.cache, model.device)
    inner = model.runner.runner
    assert isinstance(inner, GraphRunner)
    requests = [opening(i, PROMPT[i : i + 9], max_tokens=6) for i in (1, 2)]
    expected = run(engine_of(load_modules(folder)), requests).new
    assert run(engine, requests, lambda i, path: ahead_short(i, path, expected)).new == expected
    spec = FeatureSpec((0,), final=True, format=FeatureFormat.FLOAT32)
    states = [states_of(one, requests[0], spec) for one in (engine, engine_of(load_modules(folder)))]
    assert states[0][0] == states[1][0] == expected[1]
    np.testing.assert_allclose(states[0][1], states[1][1], atol=1e-4, rtol=1e-4)
    assert {key.size for key in inner.steps if key.final} == set(SIZES), "the follower captures what rank 0 does"


def states_of(engine, request, spec):
    """New tokens and hidden states, once the steps that return such states are captured."""
    name = configured(engine, spec)
    while getattr(engine.model.runner, "due", 0):
        engine.model.runner.capture_next()
    reader = Reader(engine)
    reader.open(replace(request, feature_spec=name))
    reader.run()
    return reader.tokens[1][len(request.tokens) :], reader.states(1)


def ahead_short(session_id, path, expected):
    from tests.support.target.driving import chain

    return [chain(session_id, path, expected[session_id][len(path) - 9 :][:2])]


def test_a_step_that_one_rank_cannot_capture_is_captured_by_none(pair, tmp_path):
    need_interpreter()
    model = pair.load(write_model(tmp_path / "model", num_hidden_layers=1), fused=True)
    engine = engine_of(model)
    inner = model.runner.runner

    def refuse(_):
        raise RuntimeError("not here")

    inner.capturer.capturer = refuse
    model.runner.capture(engine.cache, model.device)
    assert not inner.works
    assert len(run(engine, [opening(1, PROMPT[:9], max_tokens=4)]).new[1]) == 4


@torch.inference_mode()
def test_roots_that_only_the_device_knows_reach_all_ranks(pair, tmp_path):
    from tests.support.target.works import decoding

    model = pair.load(write_model(tmp_path / "model"))
    works = decoding(3)
    allocator = works[0].chunk.session.table.allocator
    cache = model.new_cache(allocator.total_pages, allocator.page_size)
    batch = build(works, model.device)
    known = model.runner.forward(batch, cache).logits.clone()
    ids = torch.from_numpy(batch.rows.ids.copy())
    blank = replace(batch.rows, ids=np.zeros_like(batch.rows.ids))
    rows = np.arange(len(ids))
    roots = DeferredRoots(rows, rows[::-1].copy(), ids.flip(0))
    found = model.runner.forward(replace(build(works, model.device), rows=blank, roots=roots), cache).logits
    torch.testing.assert_close(found, known)


def test_prepared_steps_give_the_text_of_one_rank(pair, tmp_path):
    """As on CUDA: of a prepared step no host knows more than its room, and every rank chooses its draft tokens."""
    need_interpreter()
    folder = write_model(tmp_path / "model", num_hidden_layers=1)
    requests = [opening(i, PROMPT[i : i + 5], SamplingParams(i / 2, seed=i), max_tokens=6) for i in range(2)]
    expected = run(engine_of(load_modules(folder)), requests)
    model = pair.load(folder, fused=True, attention_backend="triton")
    assert takes_prepared_spans(model.runner)
    engine = preparing_engine(model, page_size=4)
    engine.speculation.planner.max_tokens = 3
    found = run(engine, requests, Drafts("right", requests, expected.new))
    assert found.new == expected.new
    assert found.accepted > 2
    assert engine.prepared > 1


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Two checkpoints of a model with experts, and their texts."""
    base = tmp_path_factory.mktemp("weights")
    folders = [write_family(base / str(seed), "qwen3-moe", seed=seed) for seed in (1, 2)]
    return folders, [greedy(folder) for folder in folders]


def controlled(pair, folder, **options):
    engine = engine_of(pair.load(folder, **options), page_size=4)
    return engine, Control(engine, folder, roots=[str(folder.parent)])


def text(engine):
    return run(engine, [opening(1, PROMPT, max_tokens=NEW)]).new[1]


def sent(control, folder):
    tensors = load_file(folder / "model.safetensors")
    with control.incoming() as incoming:
        incoming.add(save(tensors))
        incoming.finish()
    return incoming


@pytest.mark.parametrize("way", ["folder", "tensors"])
def test_an_update_reaches_all_ranks(way, pair, updates):
    folders, texts = updates
    engine, control = controlled(pair, folders[0])
    assert text(engine) == texts[0]
    if way == "folder":
        weights = control.update_from_folder(control.read_folder(str(folders[1])), Update("two"))
    else:
        weights = control.update_from_tensors(sent(control, folders[1]), Update("two"))
    assert (weights.weight_version, weights.whole) == ("two", True)
    assert weights.replaced == len(load_file(folders[1] / "model.safetensors"))
    assert text(engine) == texts[1]


def test_all_ranks_take_a_place_in_a_trainers_process_group(pair, updates):
    folders, texts = updates
    engine, control = controlled(pair, folders[0])
    tensors, port = load_file(folders[1] / "model.safetensors"), free_port()
    trainer = Trainer(port, folders[1], size=3)
    member = Membership(TRAINERS, "127.0.0.1", port, 1, 3, "gloo")
    try:
        control.groups.announce("join", membership=asdict(member))
        control.groups.join(member).result()
        announced = [Announced(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
        parts = [(one.name, one.dtype, one.shape) for one in announced]
        control.groups.announce("receive", name=TRAINERS, announced=parts, flattened=False)
        trainer.broadcast(list(tensors))
        arrived = control.groups.receive(TRAINERS, announced).result()
        assert control.update_from_tensors(arrived, Update("two")).whole
        assert text(engine) == texts[1]
        control.groups.announce("leave", name=TRAINERS)
        control.groups.leave(TRAINERS).result()
    finally:
        trainer.kill()
    assert text(engine) == texts[1]


def test_a_rank_that_takes_no_weights_leaves_the_old_ones_everywhere(pair, updates):
    folders, texts = updates
    late = "model.layers.2.self_attn.o_proj.weight"  # after tensors that both ranks have taken
    engine, control = controlled(pair, folders[0], refuses=late)
    with pytest.raises(ConfigError, match=rf"not changed on any rank: rank 1: {late} cannot be kept: no room"):
        control.update_from_folder(control.read_folder(str(folders[1])), Update("two"))
    assert engine.load().weight_version == "default"
    assert text(engine) == texts[0]


def test_weights_that_cannot_be_read_leave_the_old_ones_everywhere(pair, updates, monkeypatch):
    folders, texts = updates
    engine, control = controlled(pair, folders[0])

    class Broken(dict):
        def items(self):
            yield from list(super().items())[:9]
            raise OSError("the disk has failed")

    runner = engine.model.runner
    update = runner.update
    with monkeypatch.context() as patch:
        patch.setattr(runner, "update", lambda tensors: update(Broken(tensors)))
        with pytest.raises(ConfigError, match="rank 0: the weights cannot be read: the disk has failed"):
            control.update_from_tensors(sent(control, folders[1]), Update())
    assert text(engine) == texts[0]
    control.update_from_folder(control.read_folder(str(folders[1])), Update())
    assert text(engine) == texts[1]


def test_the_ranks_do_what_serving_asks_of_one(pair, tmp_path):
    """Warm-up, the prefix cache, and compiled sampling with penalties."""
    from services.target.process.warmup import warm_up

    folder = write_model(tmp_path / "model")
    params = SamplingParams(1.0, seed=3, frequency_penalty=0.4)
    requests = [opening(i, PROMPT, params, max_tokens=NEW, logprobs=2) for i in (1, 2)]
    outcomes = []
    for model in (load_modules(folder), pair.load(folder)):
        engine = TargetEngine(model, TargetConfig(max_total_tokens=4096))
        warm_up(engine)
        outcomes.append(run(engine, requests))
    assert outcomes[0].new == outcomes[1].new
