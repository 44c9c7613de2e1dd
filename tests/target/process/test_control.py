"""Control of a target that runs: afterwards it is what a target is that was started with the new weights."""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureFormat, FeatureSpec, decode
from outrider.serving.loop import EngineLoop
from outrider.speculation.proposal import FinishReason
from outrider.wire.v1 import target_pb2
from services.target.kernels.cpu import library
from services.target.process.control import Control, Update
from services.target.process.service import TargetServicer, describe
from services.target.process.weights.shared import header_of, parts_of
from tests.support.checkpoints.mtp import write_mtp
from tests.support.target.controlled import PROMPTS, header, in_parts, knowing, requests, spoilt, started, step, tensor
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.tiny import VOCAB, write_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("way", ["folder", "tensors"])
def test_text_after_an_update_is_that_of_the_new_weights(folders, texts, way, temperature):
    engine, control = started(folders[0], page_size=4)
    old, new = texts[0, temperature], texts[1, temperature]
    assert run(engine, requests(temperature), knowing(old)).new == old  # and its prefixes are cached
    if way == "folder":
        results = control.update_from_folder(control.read_folder(str(folders[1])), Update("two"))
        assert results.fingerprint == Control(engine_of(load_model(folders[1])), folders[1]).weights.fingerprint
    else:
        tensors = load_file(folders[1] / "model.safetensors")
        names = sorted(tensors)
        for part in (names[::3], names[1::3], names[2::3]):
            content = save({name: tensors[name] for name in part})
            results = control.update_from_tensors(in_parts(control, content), Update("two"))
            assert results.replaced == len(part)
    assert results.weight_version == engine.load().weight_version == "two"
    after = run(engine, requests(temperature), knowing(new))
    assert after.new == new
    assert after.accepted > 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sessions_go_on_as_if_they_had_been_opened_anew(folders, texts, temperature):
    """The sessions continue like a target that started with the new weights."""
    engine, control = started(folders[0], page_size=4)
    opened = requests(temperature)
    tokens = {request.session_id: request.tokens.tolist() for request in opened}
    for request in opened:
        engine.open(request)
    for _ in range(4):
        step(engine, tokens, knowing(texts[0, temperature]))
    before = {i: list(path) for i, path in tokens.items()}
    results = control.update_from_folder(control.read_folder(str(folders[1])), Update())
    assert (results.retracted, results.aborted, results.weight_version) == (4, 0, "default")
    while not engine.idle:
        step(engine, tokens, knowing(texts[1, temperature]))
        engine.check()
    again = [replace(r, tokens=np.array(before[r.session_id], np.uint32)) for r in opened]
    fresh = run(engine_of(load_model(folders[1])), again)
    assert {i: path[len(before[i]) :] for i, path in tokens.items()} == fresh.new


def test_requests_can_be_aborted_by_an_update(folders, texts):
    engine, control = started(folders[0])
    for request in requests(0.0):
        engine.open(request)
    engine.step()
    results = control.update_from_folder(control.read_folder(str(folders[1])), Update(abort_all_requests=True))
    assert (results.aborted, results.retracted) == (4, 0)
    assert not engine.idle
    output = engine.step()
    assert [(c.session_id, len(c.tokens), c.finish_reason) for c in output.commits] == [
        (i, 0, FinishReason.ABORT) for i in (1, 2, 3, 4)
    ]
    assert engine.idle
    engine.check()
    assert run(engine, requests(0.0)).new == texts[1, 0.0]


def test_aborted_sessions_report_the_old_weights(folders):
    engine, control = started(folders[0])
    first, second = requests(0.0)[:2]
    engine.open(first)
    assert engine.step().load.weight_version == "default"
    control.update_from_folder(control.read_folder(str(folders[1])), Update("two", abort_all_requests=True))
    engine.open(second)
    aborted, after = engine.step(), engine.step()
    assert [commit.finish_reason for commit in aborted.commits] == [FinishReason.ABORT]
    assert (aborted.load.weight_version, after.load.weight_version) == ("default", "two")


async def test_information_follows_an_update_that_no_caller_awaits(folders, monkeypatch):
    engine, control = started(folders[0])
    began, goes_on = threading.Event(), threading.Event()
    update = engine.model.runner.update
    monkeypatch.setattr(engine.model.runner, "update", lambda tensors: (began.set(), goes_on.wait(20), update(tensors)))
    loop = EngineLoop(lambda _: None)
    loop.start(engine, lambda _: None)
    try:
        servicer = TargetServicer(None, loop)
        servicer.serve(describe(folders[0], engine, TargetConfig(model_path=str(folders[0]))), engine, control)
        request = target_pb2.UpdateWeightsFromDiskRequest(folder=str(folders[1]))
        request.update.weight_version = "two"
        call = asyncio.create_task(servicer.UpdateWeightsFromDisk(request, None))
        await asyncio.to_thread(began.wait, 20)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        goes_on.set()
        await asyncio.wrap_future(loop.call(lambda: None))
        info = await servicer.GetTargetInfo(target_pb2.GetTargetInfoRequest(), None)
    finally:
        goes_on.set()
        await asyncio.to_thread(loop.stop)
    assert (info.weight_version, info.model.fingerprint) == ("two", checkpoint.fingerprint(folders[1]))


@pytest.mark.parametrize("steps", range(7))
def test_log_probabilities_of_a_prompt_are_of_the_same_weights(folders, steps):
    """Also of one that was read in part when these came."""
    request = opening(1, PROMPTS[1], max_tokens=3, prompt_logprobs=2)
    [expected] = [c.prompt_logprobs for c in run(engine_of(load_model(folders[1])), [request]).commits[1][:1]]
    engine, control = started(folders[0], page_size=4, max_prefill_tokens=7)
    engine.open(request)
    assert not any(commit for _ in range(steps) for commit in engine.step().commits)
    control.update_from_folder(control.read_folder(str(folders[1])), Update())
    other = opening(2, PROMPTS[1], max_tokens=1)  # its pages may be shared, but not those of what is to be reported
    engine.open(other)
    reported = []
    while not engine.idle:
        reported += [commit.prompt_logprobs for commit in engine.step().commits if commit.session_id == 1]
    assert np.allclose(reported[0].values, expected.values, atol=1e-4)
    assert np.array_equal(reported[0].top_tokens, expected.top_tokens)


def test_features_after_an_update_are_those_of_the_new_weights(folders):
    spec = FeatureSpec((1, 2), format=FeatureFormat.FLOAT32)

    def rows(engine, session_id):
        engine.features.configure(1, spec, b"")
        engine.open(replace(opening(session_id, PROMPTS[1], max_tokens=4), feature_spec=1))
        blocks = []
        while not engine.idle:
            blocks += engine.step().features
        return np.concatenate([decode(block.rows, spec.format) for block in blocks])

    engine, control = started(folders[0], page_size=4)
    old = rows(engine, 1)
    assert np.array_equal(rows(engine, 2)[:44], old[:44])  # from cached pages
    control.update_from_folder(control.read_folder(str(folders[1])), Update())
    new = rows(engine, 3)
    assert np.allclose(new, rows(engine_of(load_model(folders[1])), 1), atol=1e-3)
    assert not np.allclose(new[:44], old[:44], atol=1e-1)


def test_pages_computed_anew_have_their_features(folders):
    """A session that was under way is not reported twice, but who shares its pages later is reported all."""
    spec = FeatureSpec((1, 2), format=FeatureFormat.FLOAT32)
    engine, control = started(folders[0], page_size=4)
    engine.features.configure(1, spec, b"")
    engine.open(replace(opening(1, PROMPTS[1], max_tokens=20), feature_spec=1))
    for _ in range(3):
        engine.step()
    control.update_from_folder(control.read_folder(str(folders[1])), Update())
    blocks = []
    while not engine.idle:
        blocks += engine.step().features
    assert blocks[0].first == 45 + 3 - 1
    engine.open(replace(opening(2, PROMPTS[1], max_tokens=4), feature_spec=1))
    first = engine.step().features[0]
    assert first.first == 0
    fresh = engine_of(load_model(folders[1]))
    fresh.features.configure(1, spec, b"")
    fresh.open(replace(opening(1, PROMPTS[1], max_tokens=4), feature_spec=1))
    truth = decode(fresh.step().features[0].rows, spec.format)
    rows = decode(first.rows, spec.format)
    assert len(rows) < len(truth), "a page's rows came from the cache"
    assert np.allclose(rows, truth[: len(rows)], atol=1e-3)


def test_a_sharded_folder_in_half_width_is_taken_as_well(folders, tmp_path):
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
    module.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    engine, control = started(folders[0])
    control.update_from_folder(control.read_folder(str(tmp_path)), Update())
    fresh = engine_of(load_model(tmp_path))
    assert run(engine, requests(0.0)).new == run(fresh, requests(0.0)).new


def test_equal_weights_have_equal_fingerprints_in_any_parts(folders):
    tensors = load_file(folders[1] / "model.safetensors")
    names = sorted(tensors)
    parts = [save({name: tensors[name] for name in part}) for part in (names[::3], names[1::3], names[2::3])]
    found = []
    for order, folder in (((0, 1, 2), 0), ((2, 1, 0, 2), 0), ((0, 1), 0), ((1, 0), 0), ((0, 1), 1), ((0, 1, 2), 1)):
        _, control = started(folders[folder])
        before = control.weights.fingerprint
        for part in order:
            results = control.update_from_tensors(in_parts(control, parts[part]), Update())
            assert results.before == before
            before = results.fingerprint
        found.append((results.fingerprint, results.whole))
    whole, some, others = found[0], found[2], found[4]
    assert found == [whole, whole, some, some, others, whole]
    assert len({whole, some, others}) == 3
    assert (whole[1], some[1], others[1]) == (True, False, False)
    results = control.update_from_folder(control.read_folder(str(folders[0])), Update())
    assert (results.fingerprint, results.whole) == (checkpoint.fingerprint(folders[0]), True)


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("width", [torch.float32, torch.float16])
def test_wider_weights_are_rounded_as_in_loading(tmp_path, width, quantization, backend):
    if quantization is not None and not library.available():
        pytest.skip("weights are narrowed by compiled kernels")
    first, second = (write_model(tmp_path / str(seed), "qwen2", seed=seed) for seed in (1, 2))
    noise = torch.Generator().manual_seed(3)  # norms and biases of a random model have no bits to lose
    tensors = load_file(second / "model.safetensors").items()
    rough = {k: (v + 0.1 * torch.randn(v.shape, generator=noise)).to(width) for k, v in tensors}
    save_file(rough, second / "model.safetensors", {"format": "pt"})
    flags = {"dtype": "bfloat16", "quantization": quantization, "attention_backend": backend}
    model = load_model(first, **flags)
    model.runner.update(rough)
    asked = [opening(i, prompt, max_tokens=8, logprobs=0) for i, prompt in enumerate(PROMPTS, start=1)]
    after, fresh = run(engine_of(model), asked), run(engine_of(load_model(second, **flags)), asked)
    assert after.new == fresh.new
    for i in after.commits:
        reported, expected = ([c.logprobs.values for c in found.commits[i]] for found in (after, fresh))
        assert np.array_equal(np.concatenate(reported), np.concatenate(expected))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


# --- an invalid update changes nothing and reports the reason ---


@pytest.mark.parametrize("backend", ["auto", "torch_native"])
@pytest.mark.parametrize("way", ["folder", "tensors"])
def test_an_embedding_that_is_the_head_may_come_by_either_name_or_both(tmp_path, way, backend):
    first, second = (write_model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in (1, 2))
    tensors = load_file(second / "model.safetensors")
    assert HEAD not in tensors
    expected = run(engine_of(load_model(second, attention_backend=backend)), requests(0.0)).new
    both = tensors | {HEAD: tensors[EMBEDDING].clone()}
    for number, came in enumerate((both, {name: both[name] for name in both if name != EMBEDDING})):
        engine = engine_of(load_model(first, attention_backend=backend))
        control = Control(engine, first, roots=[str(tmp_path)])
        if way == "folder":
            folder = spoilt(second, tmp_path / f"named{number}", **{HEAD: came[HEAD], EMBEDDING: came.get(EMBEDDING)})
            results = control.update_from_folder(control.read_folder(str(folder)), Update())
        else:
            results = control.update_from_tensors(in_parts(control, save(came)), Update())
        assert (results.replaced, results.whole) == (len(tensors), True)
        assert run(engine, requests(0.0)).new == expected
    differ = {EMBEDDING: tensors[EMBEDDING], HEAD: tensors[EMBEDDING] + 1}
    folder = spoilt(second, tmp_path / "differs", **differ)
    with pytest.raises(ConfigError, match=r"lm_head\.weight and model\.embed_tokens\.weight are one"):
        control.read_folder(str(folder)) if way == "folder" else in_parts(control, save(differ))
    end = 4 * VOCAB * 48
    huge = header({EMBEDDING: tensor(0, end, (VOCAB, 48)), HEAD: tensor(end, end + (4 << 48), (1 << 48,))})
    with control.incoming() as incoming, pytest.raises(ConfigError, match="the model's has"):
        incoming.add(huge)


def parts_of_shared(control, names):
    """What GetSharedWeights sends, as tensors."""
    found = control.shared.find(names)
    return load(header_of(found) + b"".join(part for one in found.values() for part in parts_of(one.read())))


# --- pauses and flushes ---


def test_tensors_that_drafts_share_are_kept(tmp_path, folders):
    """Also MTP layers, which only drafts have; those of no draft are not kept, and no fingerprint depends on them."""
    folder = write_mtp(tmp_path / "a" / "glm", "glm-4.5")
    _, control = started(folder)
    tensors = load_file(folder / "model.safetensors")
    embed, norm, layer = "model.embed_tokens.weight", "model.norm.weight", "model.layers.3.eh_proj.weight"
    names = (embed, "lm_head.weight", layer)
    assert (parts_of_shared(control, names), control.shared.fingerprint) == ({}, "")

    def update(*chosen, shared=names):
        new = {name: tensors[name] + 1 for name in chosen}
        control.update_from_tensors(in_parts(control, save(new)), Update(shared=shared))
        return new, control.shared.fingerprint, control.weights.fingerprint

    _, first, whole = update(norm)
    sent, second, later = update(embed, layer)
    found = parts_of_shared(control, names)
    assert found.keys() == {embed, layer}
    assert all(torch.equal(found[name], sent[name]) for name in found)
    assert len({"", first, second}) == 3
    assert whole != later == update(layer)[2]
    update("lm_head.weight", shared=())
    with pytest.raises(ConfigError, match=r"no copy of lm_head\.weight"):
        control.shared.find(names)
    with pytest.raises(ConfigError, match=r"eh_proj\.weight has shape \[3\]"):
        in_parts(control, save({layer: torch.zeros(3)}))
    with pytest.raises(ConfigError, match="no tensors of these names"):
        in_parts(control, save({layer.replace("3", "4"): torch.zeros(3)}))
    control.update_from_folder(control.read_folder(str(folder)), Update())
    found = parts_of_shared(control, names)
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert control.shared.fingerprint == checkpoint.fingerprint(folder)


def test_a_tied_head_is_kept_under_either_name(tmp_path):
    folder = write_model(tmp_path / "a" / "tied", tie_word_embeddings=True)
    _, control = started(folder)
    new = load_file(folder / "model.safetensors")["model.embed_tokens.weight"] * 2
    names = ("model.embed_tokens.weight", "lm_head.weight")
    control.update_from_tensors(in_parts(control, save({"lm_head.weight": new})), Update(shared=names))
    assert all(torch.equal(tensor, new) for tensor in parts_of_shared(control, names).values())
