"""Control of a target that runs: afterwards it is what a target is that was started with the new weights."""

import asyncio
import json
import shutil
import struct
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file

from outrider.checkpoints import checkpoint
from outrider.config import TargetConfig
from outrider.errors import ConfigError, Conflict, EngineFault, InvalidRequest, Overloaded
from outrider.serving.features import FeatureFormat, FeatureSpec, decode
from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from outrider.wire.v1 import target_pb2
from services.target.kernels.cpu import library
from services.target.process.control import Condition, Control, Update
from services.target.process.service import TargetServicer, describe
from services.target.process.weights.shared import header_of, parts_of
from tests.support.checkpoints.mtp import write_mtp
from tests.support.target.driving import GREEDY, chain, engine_of, load_model, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model, write_tokenizer

PROMPTS = [[5, 6, 7], list(range(30, 75)), [9] * 20, [200]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two checkpoints of one architecture."""
    base = tmp_path_factory.mktemp("weights")
    return [write_model(base / str(seed), seed=seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def texts(folders):
    """What freshly started targets say, by checkpoint and temperature."""
    return {
        (i, t): run(engine_of(load_model(folder)), requests(t)).new
        for i, folder in enumerate(folders)
        for t in (0.0, 1.0)
    }


def requests(temperature, **options):
    params = SamplingParams(temperature, seed=4)
    return [opening(i, prompt, params, max_tokens=30, **options) for i, prompt in enumerate(PROMPTS, start=1)]


def started(folder, **flags):
    engine = engine_of(load_model(folder), **flags)
    return engine, Control(engine, folder, roots=[str(folder.parents[1])])


def knowing(new):
    """Proposals that contain the text `new`, among others."""

    def proposals(session_id, path):
        rng = np.random.default_rng(len(path))
        done = len(path) - len(PROMPTS[session_id - 1])
        ahead = chain(session_id, path, new[session_id][done : done + 3])
        return [random_tree(rng, session_id, path, VOCAB, 5), ahead]

    return proposals


def step(engine, tokens, proposals):
    """One step with proposals; tokens of each session grow."""
    for session_id, path in tokens.items():
        engine.receive(proposals(session_id, path), ())
    output = engine.step()
    assert not output.failures
    for commit in output.commits:
        assert commit.base_length == len(tokens[commit.session_id])
        tokens[commit.session_id] += commit.tokens.tolist()
    return output


def in_parts(control, content, size=1000):
    with control.incoming() as incoming:
        for start in range(0, len(content), size):
            incoming.add(content[start : start + size])
        incoming.finish()
    return incoming


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


# --- an invalid update changes nothing and reports the reason ---


def spoilt(folder, target, **changes):
    """A copy of a checkpoint with other tensors; None leaves one out."""
    shutil.copytree(folder, target)
    tensors = {k: v for k, v in (load_file(folder / "model.safetensors") | changes).items() if v is not None}
    save_file(tensors, target / "model.safetensors")
    return target


NORM = "model.norm.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize(("changes", "words"), [
    ({NORM: None}, "missing.*model.norm.weight"),
    ({NORM: torch.ones(47)}, r"shape \[47\]; the model's has \[48\]"),
    ({"model.extra": torch.ones(1)}, "no tensors of these names: model.extra"),
    ({NORM: torch.ones(48, dtype=torch.int32)}, "type I32"),
])  # fmt: skip
def test_weights_that_do_not_fit_change_nothing(folders, texts, tmp_path, changes, words):
    engine, control = started(folders[0])
    with pytest.raises(ConfigError, match=words):
        control.read_folder(str(spoilt(folders[1], tmp_path / "spoilt", **changes)))
    if None not in changes.values():
        with pytest.raises(ConfigError, match=words):
            in_parts(control, save(changes))
    assert control.weights.weight_version == "default"
    assert run(engine, requests(0.0)).new == texts[0, 0.0]


DIFFERENCES = (
    ({"rms_norm_eps": 0.5}, r"rms_norm_eps: 0\.5"),
    ({"rope_theta": 5.0}, r"rope_theta: 5\.0"),  # the library would ignore it beside rope_parameters
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters"),
    ({"attention_bias": True}, "attention_bias: True"),
    ({"eos_token_id": 7}, "eos_token_id: 7"),
    ({"model_type": "qwen2"}, "model_type: qwen2"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"hidden_size": "wide"}, "cannot be used"),
)


def test_folders_of_updates_are_allowed_ones_and_bring_no_code(folders, tmp_path):
    """One message, whether a path exists or not; the code of a checkpoint is not run, even where it is trusted."""
    engine = engine_of(load_model(folders[0]))
    control = Control(engine, folders[0], model_path="somebody/model", trust_remote_code=True)
    outside = spoilt(folders[1], tmp_path / "outside")
    inside = folders[0].parent / "inside"
    inside.symlink_to(outside)
    (folders[0].parent / "bare").mkdir()
    beside = f"{folders[0].parent}/../{tmp_path.name}/outside"
    paths = [outside, inside, beside, tmp_path / "nowhere", folders[0].parent / "nowhere", folders[0].parent / "bare"]
    paths += [outside / "config.json", "/etc/passwd", "org/name", "default", "a\0b", "x" * 5000, "~nobody/x"]
    messages = set()
    for path in paths:
        with pytest.raises(ConfigError) as caught:
            control.read_folder(str(path))
        messages.add(caught.value.message)
    assert len(messages) == 1
    assert "--weight-update-roots" in messages.pop()
    assert control.read_folder("somebody/model").path == folders[0]
    own = spoilt(folders[1], folders[0].parent / "own")
    settings = json.loads((own / "config.json").read_text())
    references = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (own / "config.json").write_text(json.dumps(settings | {"auto_map": references}))
    (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
    control.read_folder(str(own))
    assert not (tmp_path / "ran").exists()
    everywhere = Control(engine, folders[0], roots=["/"])
    assert everywhere.read_folder(str(outside)).path == outside


def test_an_update_holds_only_under_its_condition(folders):
    engine, control = started(folders[0])
    first, second = (checkpoint.fingerprint(folder) for folder in folders)
    with pytest.raises(ConfigError, match=f"other weights by now, fingerprint {second}"):
        control.read_folder(str(folders[1]), Condition(first))
    condition = Condition(second, first)
    folder = control.read_folder(str(folders[1]), condition)
    assert control.update_from_folder(folder, Update("two"), condition).folder == str(folders[1])
    with pytest.raises(ConfigError, match=f"changed meanwhile; their fingerprint is {second}"):
        control.update_from_folder(folder, Update("three"), condition)
    assert engine.weight_version == "two"
    assert control.update_from_tensors(in_parts(control, save({NORM: torch.ones(48)})), Update()).folder == ""


def test_incomplete_or_different_checkpoints_are_rejected(folders, tmp_path):
    _, control = started(folders[0])
    short = spoilt(folders[1], tmp_path / "short")
    data = (short / "model.safetensors").read_bytes()
    for content, words in ((data[:-5], "not complete"), (data[:20], "no header"), (b"x" * 99, "no header")):
        (short / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            control.read_folder(str(short))
    other = spoilt(folders[1], tmp_path / "other")
    settings = json.loads((other / "config.json").read_text())
    for changes, words in DIFFERENCES:
        (other / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match=words):
            control.read_folder(str(other))
    written = settings | {
        "rms_norm_eps": settings["rms_norm_eps"] * (1 + 1e-8), "rope_theta": settings["rope_parameters"]["rope_theta"],
        "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None, "transformers.js_config": {"a": 1},
        "torch_dtype": "bfloat16", "initializer_range": 0.5, "eos_token_id": [1], "_model_name_or_path": "hub",
    }  # fmt: skip
    written.pop("head_dim")  # 48 / 4 is not 16: what the class derives is compared
    (other / "config.json").write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="head_dim: 12"):
        control.read_folder(str(other))
    (other / "config.json").write_text(json.dumps(written | {"head_dim": 16}))
    control.read_folder(str(other))


def header(entries, rest=b""):
    content = json.dumps(entries).encode() if isinstance(entries, dict) else entries
    return struct.pack("<Q", len(content)) + content + rest


def tensor(start, stop, shape=(48,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


@pytest.mark.parametrize(("sent", "words"), [
    (struct.pack("<Q", 1 << 62), "at most"),
    (struct.pack("<Q", 1 << 20), "at most"),
    (header({NORM: tensor(1 << 40, (1 << 40) + 192)}), "a gap"),
    (header({NORM: tensor(0, 1 << 50)}), "does not fit its shape"),
    (header({NORM: tensor(0, 192), "model.layers.0.input_layernorm.weight": tensor(96, 288)}), "an overlap"),
    (header({NORM: tensor(0, 192), "model.layers.0.input_layernorm.weight": tensor(200, 392)}), "a gap"),
    (header({NORM: tensor(0, 4 << 50, (1 << 50,))}), "the model's has"),
    (header({NORM: tensor(-192, 0)}), "does not describe"),
    (header({NORM: tensor(0, 192, (True, 48))}), "does not describe"),
    (header({NORM: tensor(0, 96, (48,), "F8")}), "type F8"),
    (header(b"[" * 50_000), "does not describe"),
    (header(b'{"%s": 1' % NORM.encode()), "does not describe"),
])  # fmt: skip
def test_headers_that_promise_too_much_are_refused_before_their_tensors(folders, sent, words):
    """A caller that never stops sending fills no memory."""
    _, control = started(folders[0])
    with control.incoming() as incoming, pytest.raises(ConfigError, match=words):
        incoming.add(sent)


def test_tensors_of_one_update_at_a_time_are_received(folders):
    _, control = started(folders[0])
    with control.incoming(), pytest.raises(Conflict, match="another update"), control.incoming():
        pass
    with control.incoming():
        pass


def test_incomplete_streams_are_rejected(folders):
    _, control = started(folders[0])
    content = save({NORM: torch.ones(48)})
    for data, words in (
        (content[:-1], "less"),
        (content + b"1", "more"),
        (content[:20], "less"),
        (b"\xff" * 30, "no safe"),
    ):
        with pytest.raises(ConfigError, match=words):
            in_parts(control, data)


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


def sharded(folder, target):
    """A copy of a checkpoint in several files."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(target, max_shard_size="40KB")
    assert len(list(target.glob("*.safetensors"))) > 2
    return target


@pytest.mark.parametrize(("broken", "error", "words"), [
    (0, ConfigError, "nothing has changed"), (-1, EngineFault, "in part"),
])  # fmt: skip
def test_a_disk_that_fails_in_the_midst_ends_the_engine(folders, texts, tmp_path, broken, error, words):
    engine, control = started(folders[0])
    folder = control.read_folder(str(sharded(folders[1], tmp_path / "weights")))
    file = list(folder.files)[broken]
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(error, match=words):
        control.update_from_folder(folder, Update())
    if error is ConfigError:
        assert control.weights.weight_version == "default"
        assert run(engine, requests(0.0)).new == texts[0, 0.0]


def test_unreadable_weights_are_rejected(folders, tmp_path):
    _, control = started(folders[0])
    folder = spoilt(folders[1], tmp_path / "linked")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot be read.*model\.safetensors"):
        control.read_folder(str(folder))


# --- pauses and flushes ---


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token(folders, texts, mode):
    engine, control = started(folders[0], page_size=4)
    tokens = {request.session_id: request.tokens.tolist() for request in requests(1.0)}
    for request in requests(1.0)[:3]:
        engine.open(request)
    for _ in range(4):
        step(engine, tokens, knowing(texts[0, 1.0]))
    assert control.pause(mode) == 0
    assert engine.idle
    engine.open(requests(1.0)[3])  # it waits
    assert engine.idle
    assert engine.scheduler.running == (0 if mode == "retract" else 3)
    assert engine.load().paused
    engine.check()
    control.proceed()
    assert not engine.load().paused
    while not engine.idle:
        step(engine, tokens, knowing(texts[0, 1.0]))
    assert {i: path[len(PROMPTS[i - 1]) :] for i, path in tokens.items()} == texts[0, 1.0]


def test_a_pause_can_abort(folders):
    engine, control = started(folders[0])
    for request in requests(0.0):
        engine.open(request)
    engine.step()
    assert control.pause("abort") == 4
    assert [commit.finish_reason for commit in engine.step().commits] == [FinishReason.ABORT] * 4
    assert engine.idle
    engine.open(opening(9, [5, 6], GREEDY, max_tokens=2))
    assert engine.idle
    control.proceed()
    assert not engine.idle
    engine.step()


def test_the_cache_is_flushed_only_while_nothing_runs(folders):
    engine, control = started(folders[0], page_size=4)
    run(engine, requests(0.0))
    assert len(engine.scheduler.prefix) > 0
    engine.open(requests(0.0)[0])
    for act in (lambda: None, engine.step, lambda: control.pause("in_place")):
        act()
        with pytest.raises(InvalidRequest, match="under way"):
            control.flush_cache()
    control.pause("retract")
    control.flush_cache()
    assert len(engine.scheduler.prefix) == 0
    engine.check()


@pytest.mark.parametrize("flush", ["update", "flush"])
def test_a_session_that_waited_for_a_grammar_shares_pages(tmp_path, flush):
    folder = write_tokenizer(write_model(tmp_path))
    engine, control = started(folder, page_size=4)
    control.pause("in_place")
    for i in (1, 2):
        engine.open(opening(i, PROMPTS[1], max_tokens=3, grammar=Grammar(GrammarKind.REGEX, "[a-z]+")))
    if flush == "update":
        control.update_from_folder(control.read_folder(str(folder)), Update())
    else:
        control.flush_cache()
    engine.sessions.grammars.wait(60)
    control.proceed()
    cached = {}
    while not engine.idle:
        for commit in engine.step().commits:
            cached.setdefault(commit.session_id, commit.cached_tokens)
    assert cached == {1: 0, 2: 44}
    engine.check()


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_no_session_starts_during_a_pause(folders, mode):
    engine, control = started(folders[0], page_size=4, max_queued_requests=1, max_running_requests=4)
    control.pause(mode)
    wanted = [replace(requests(0.0)[0], session_id=i) for i in range(1, 7)]
    for request in wanted[:5]:  # four places, and one who waits
        engine.open(request)
    with pytest.raises(Overloaded, match="5 requests wait already"):
        engine.open(wanted[5])
    assert engine.scheduler.running == 0
    control.flush_cache()
    control.proceed()
    ended = 0
    while not engine.idle:
        ended += sum(commit.finish_reason is not FinishReason.RUNNING for commit in engine.step().commits)
    assert ended == 5


def parts_of_shared(control, names):
    """What GetSharedWeights sends, as tensors."""
    found = control.shared.find(names)
    return load(header_of(found) + b"".join(part for one in found.values() for part in parts_of(one.read())))


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
