"""Updates that a running target refuses: they change nothing, or end the engine where they have changed something."""

import contextlib
import json
import struct

import pytest
import torch
from safetensors.torch import save

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError, Conflict, EngineFault
from services.target.process.control import Condition, Control, Update
from tests.support.target.controlled import header, in_parts, requests, spoilt, started, tensor
from tests.support.target.driving import engine_of, load_model, run

NORM = "model.norm.weight"


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


@pytest.mark.parametrize(("number", "flags", "words"), [
    (float("nan"), {}, f"{NORM} has NaN among its numbers"),
    (float("-inf"), {}, f"{NORM} has inf among its numbers"),
    (3.4e38, {"dtype": "bfloat16"}, rf"{NORM} has 3\.4e\+38 among its numbers, which weights in bfloat16 must not"),
    (3.4e38, {}, ""),
])  # fmt: skip
def test_numbers_that_are_not_finite_are_refused(folders, tmp_path, number, flags, words):
    """Such weights would make each text nonsense, and an infinite one comes of a type that is too narrow."""
    engine = engine_of(load_model(folders[0], **flags))
    control = Control(engine, folders[0], roots=[str(tmp_path)])
    norm = torch.ones(48)
    norm[17] = number
    expects = pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext()
    with expects:
        control.read_folder(str(spoilt(folders[1], tmp_path / "spoilt", **{NORM: norm})))
    with expects:
        control.check_numbers(in_parts(control, save({NORM: norm})))


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
    control = Control(engine, folders[0], model_path="org/model", trust_remote_code=True)
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
    assert control.read_folder("org/model").path == folders[0]
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
    (header(b'{"%s": %s, "%s": %s}' % (2 * (NORM.encode(), json.dumps(tensor(0, 192)).encode()))), "does not describe"),
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
