"""A whole training run: a target generates, a head is trained, the published head serves, and the text is unchanged."""

import asyncio
import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError

from outrider.checkpoints import checkpoint
from outrider.config import DraftConfig, TrainConfig, to_argv
from outrider.errors import ConfigError, EngineFault
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureFormat, decode
from services.draft.drafters.feature import FeatureDrafter
from services.draft.formats.target import read_target
from services.draft.learning import optimize
from services.draft.learning.algorithms import DraftShape, algorithm_of
from services.draft.learning.batches import Batches
from services.draft.learning.data_parallel import DataParallel
from services.draft.learning.disk import reporting_full_disk
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.optimize import Schedule, Trainer
from services.draft.learning.store import Record, Store
from services.draft.learning.vocabulary import draft_ids
from services.draft.process.app import build
from services.draft.train import app
from services.draft.train.data.writing import open_store, write_answers
from services.draft.train.evaluate import CHAIN, replay
from services.draft.train.run import TrainingRun
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.mtp import write_mtp
from tests.support.checkpoints.perfect import cycle_text, write_cyclic_target
from tests.support.draft.training import head_of, random_record, shared_of, states_of_cycle, store_of, target_of
from tests.support.gateway.services import Gateway
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import VOCAB, write_model, write_tokenizer

FLAGS = {
    "tokens": 1500, "max_new_tokens": 40, "max_length": 160, "max_running_requests": 16, "draft_vocab_size": 64,
    "intermediate_size": 64, "steps": 40, "batch_tokens": 600, "learning_rate": 5e-3, "unroll": 4, "held_out": 0.2,
    "evaluate": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target with predictable text, and prompts."""
    base = tmp_path_factory.mktemp("models")
    write_tokenizer(write_cyclic_target(base / "target", intermediate_size=4000))
    lines = [{"prompt": f"p{i}"} for i in range(30)] + [{"turns": ["a", "b"]}, {"text": "so so"}]
    (base / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return base


@pytest.fixture(scope="module")
def trained(models):
    """A training run with a target in the same process. Returns its folder."""
    service = target_service(models / "target", f"unix:{models}/writer", max_running_requests=16).start()
    config = TrainConfig(
        model_path=str(models / "target"), data=(str(models / "prompts.jsonl"),), free_prompts=4,
        output=str(models / "draft"), target=service.address, **FLAGS,
    )  # fmt: skip
    try:
        assert app.train(config) == 0
    finally:
        service.stop()
    return models / "draft"


def test_head_learns_its_target(trained):
    report = json.loads((trained / "training.json").read_text())
    for temperature in (0, 1):
        for kind in ("chain", "tree"):
            assert report["evaluation"][kind][f"temperature {temperature}"]["accept_length"] > 3
    losses = report["curve"]["losses"]
    assert np.mean(losses[-1]) < 0.2 * np.mean(losses[0])
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (trained / "checkpoint").exists()
    assert report["sharpness"]["gains"][0] == 1
    answers = trained.with_name("draft.answers")
    assert json.loads((answers / "about.json").read_text())["layers"] == [2, 4, 5]


def test_rollouts_are_learnt_without_answers_of_the_target(trained, models, tmp_path):
    """The states that a prefill computes over them are those of the steps that wrote the same tokens."""
    written = Store(
        Path(str(trained) + ".answers"), json.loads(Path(f"{trained}.answers/about.json").read_text()), 4 * 2 * 48
    ).read()
    samples = [written.record(i) for i in range(8)]
    lines = [{"tokens": one.tokens.tolist(), "response_length": len(one.tokens) - one.prompt} for one in samples]
    lines += [lines[0], {"input_ids": [5, 6], "output_ids": list(range(10, 240))}]  # the same again; a long one
    lines += [{"input_ids": [5] * 159, "output_ids": [6]}, {"input_ids": [5, 6], "output_ids": [VOCAB, 7]}]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    service = target_service(models / "target", f"unix:{tmp_path}/target").start()
    config = TrainConfig(
        model_path=str(models / "target"), data=(str(tmp_path / "rollouts.jsonl"),), target=service.address,
        output=str(tmp_path / "draft"), **FLAGS | {"steps": 1},
    )  # fmt: skip
    target = models / "target"
    algorithm = TrainingRun(config, target).algorithm
    store = open_store(config, target, algorithm.states)
    try:
        asyncio.run(write_answers(config, store, algorithm.states, checkpoint.fingerprint(target)))
    finally:
        service.stop()
    reader = store.read()
    found = {reader.tokens(i).tobytes(): reader.record(i) for i in range(len(reader))}
    assert len(found) == len(reader) == 9, "one is too long, and one has unknown tokens"
    for one in samples:
        again = found[one.tokens.tobytes()]
        assert (again.prompt, again.first) == (one.prompt, one.prompt)
        states, expected = (decode(r.rows, FeatureFormat.BFLOAT16) for r in (again, one))
        np.testing.assert_allclose(states, expected, rtol=0.02, atol=0.02)
    assert sorted(len(record.tokens) for record in found.values())[-1] == 160


def test_answers_are_written_here_and_learnt_elsewhere(trained, models, tmp_path):
    """Token ids alone travel; a further training of the head computes the states again, and ends in time."""
    answers = trained.with_name("draft.answers")
    common = {"model_path": str(models / "target"), **FLAGS}
    exported = tmp_path / "answers.npz"
    export = TrainConfig(
        answers=str(answers), export_answers=str(exported), output=str(tmp_path / "none"), **common
    )  # fmt: skip
    assert app.train(export) == 0
    assert exported.stat().st_size < 20_000
    service = target_service(models / "target", f"unix:{tmp_path}/target").start()
    config = TrainConfig(
        data=(str(exported),), initial=str(trained), minutes=1e-4, target=service.address,
        output=str(tmp_path / "further"), **common | {"evaluate": 0, "steps": 10_000, "tokens": 10**6},
    )  # fmt: skip
    try:
        assert app.train(config) == 0
    finally:
        service.stop()
    report = json.loads((tmp_path / "further" / "training.json").read_text())
    assert 1 <= report["steps"] < 10_000, "as many as fit into the minutes"
    assert report["curve"]["seen"][0][0] == 0
    lengths = [length for length in report["curve"]["seen"][0][1:] if length]  # 0: no such answer was held out
    assert lengths, "answers were held out"
    assert min(lengths) > 3, "it goes on from the trained head"
    assert 0 <= report["waited_for_batches"] <= report["step_seconds"] + 0.1
    row = 4 * 2 * 48
    before, after = (
        Store(folder, json.loads((folder / "about.json").read_text()), row).read().entries
        for folder in (answers, tmp_path / "further.answers")
    )
    facts = ["temperature", "seed", "held_out", "prompt", "first", "tokens"]
    there = {tuple(one) for one in before[facts].tolist()}
    assert len(after) > 20
    assert {tuple(one) for one in after[facts].tolist()} <= there


def test_target_with_other_weights_is_refused(models, tmp_path):
    other = write_tokenizer(write_cyclic_target(tmp_path / "other", intermediate_size=96))
    service = target_service(other, f"unix:{tmp_path}/writer").start()
    config = TrainConfig(
        model_path=str(models / "target"), data=(str(models / "prompts.jsonl"),), output=str(tmp_path / "draft"),
        target=service.address, **FLAGS,
    )  # fmt: skip
    try:
        with pytest.raises(ConfigError, match="name the checkpoint that the target serves"):
            app.train(config)
    finally:
        service.stop()


def test_the_output_folder_is_not_written_twice(models, trained):
    config = TrainConfig(model_path=str(models / "target"), output=str(trained), **FLAGS)
    with pytest.raises(ConfigError, match="holds a model already"):
        app.train(config)


def test_run_interrupted_in_its_evaluation_resumes(models, trained, tmp_path, monkeypatch):
    config = TrainConfig(
        model_path=str(models / "target"), output=str(tmp_path / "draft"), answers=str(trained) + ".answers",
        **FLAGS | {"steps": 1, "evaluate": 1},
    )  # fmt: skip

    def end(*_):
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "report", end)
        with pytest.raises(InterruptedError):
            app.train(config)
    assert (tmp_path / "draft" / "model.safetensors").exists()
    assert app.train(config) == 0
    report = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert report["steps"] == len(report["curve"]["losses"]) == 1
    assert not (tmp_path / "draft" / "checkpoint").exists()


def test_trained_head_is_served(models, trained, tmp_path):
    """Accepted draft tokens, and the same text as without a draft."""
    target = target_service(models / "target", f"unix:{tmp_path}/target", speculative_num_draft_tokens=8).start()

    def ask(*drafts, wanted=0):
        """Texts, and accepted draft tokens; repeated on busy machines, where proposals arrive late."""
        folder = tmp_path / f"gateway-{len(drafts)}"
        folder.mkdir()
        gateway = Gateway(folder, [target.address], list(drafts)).wait()
        texts, accepted = set(), 0.0
        for _ in range(10):
            texts.add(tuple(
                gateway.complete(prompt, max_tokens=60, temperature=t, seed=5)["choices"][0]["text"]
                for prompt in ("hello", "b b b") for t in (0, 1)
            ))  # fmt: skip
            accepted = gateway.metric("outrider_accepted_draft_tokens_total")
            if accepted >= wanted:
                break
        gateway.stop()
        return texts, accepted

    plain, none = ask()
    config = DraftConfig(
        speculative_algorithm="EAGLE3", speculative_draft_model_path=str(trained), max_running_requests=4,
        model_path=str(models / "target"), draft_max_total_tokens=4096,
    )  # fmt: skip
    made = build(config)[0].drafter
    made.warm_up()
    prefix = PrefixCache(PageAllocator(made.prefix.allocator.total_pages, 16))
    drafter = FeatureDrafter("EAGLE3", made.runner, prefix, 4, 64, made.features, made.fusion)
    draft = draft_service(f"unix:{tmp_path}/draft", drafter).start()
    texts, accepted = ask(draft.address, wanted=60)
    draft.stop()
    target.stop()
    assert none == 0
    assert accepted >= 60
    assert texts == plain


# --- export ---


def test_the_published_folder(tmp_path):

    from services.draft.formats.eagle3 import read_eagle3
    from services.draft.model.weights.tensors import Tensors

    target = target_of(tmp_path / "target")
    algorithm, ids, params = head_of(target, layers=2)
    algorithm.publish(params, ids, tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 48, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "attention_bias": False, "mlp_bias": False, "bias": False, "tie_word_embeddings": False, "vocab_size": VOCAB,
        "draft_vocab_size": 64, "target_hidden_size": 48, "num_aux_hidden_states": 3,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "norm_before_residual": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    layer = {
        "self_attn.q_proj": (64, 96), "self_attn.k_proj": (32, 96), "self_attn.v_proj": (32, 96),
        "self_attn.o_proj": (48, 64), "mlp.gate_proj": (64, 48), "mlp.up_proj": (64, 48), "mlp.down_proj": (48, 64),
        "hidden_norm": (48,), "post_attention_layernorm": (48,),
    }  # fmt: skip
    expected = {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    expected |= {
        f"layers.1.{name}.weight".replace("hidden_norm", "input_layernorm"): (shape[0], 48)
        if "q_p" in name or "k_p" in name or "v_p" in name
        else shape
        for name, shape in layer.items()
    }
    expected |= {
        "midlayer.input_layernorm.weight": (48,), "fc.weight": (48, 144), "norm.weight": (48,),
        "lm_head.weight": (64, 48), "d2t": (64,), "t2d": (VOCAB,),
    }  # fmt: skip
    with Tensors(tmp_path / "head") as tensors:
        assert {name: tensors.shape(name) for name in tensors.names} == expected
        offsets = tensors.read("d2t", integers=True)
        members = tensors.read("t2d", integers=True)
        assert {tensors.read(name).dtype.name for name in expected if name not in ("d2t", "t2d")} == {"bfloat16"}
    assert (offsets.dtype, members.dtype) == (np.int64, np.bool_)
    np.testing.assert_array_equal(offsets + np.arange(64), ids)
    np.testing.assert_array_equal(np.flatnonzero(members), ids)
    draft = read_eagle3(tmp_path / "head", target)
    assert draft.features.layers == (2, 4, 5) == algorithm.states.layers


def test_a_published_mtp_layer_is_one_of_qwen2(tmp_path):
    """With all tensors of such a layer in MiMo-7B; `transformers` can load config.json."""
    from transformers import AutoConfig
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    algorithm, ids, params = head_of(target_of(tmp_path / "target"), name="NEXTN")
    algorithm.publish(params, ids, tmp_path / "head")
    config = AutoConfig.from_pretrained(tmp_path / "head")
    assert config.architectures == ["MiMoMTP"]
    joins = {f"{name}.weight" for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")}
    tensors = safetensors.torch.load_file(tmp_path / "head" / "model.safetensors")
    tensors = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in tensors.items()}
    Qwen2DecoderLayer(config, 0).load_state_dict({n: t for n, t in tensors.items() if n not in joins}, strict=True)
    assert joins <= set(tensors)


# --- learning ---


def trainer_of(target, folder, records, steps=12, name="EAGLE3", devices=1):
    shape = {"block": 3, "layers": 1, "aux_layers": (1, 3, 4)} if name == "DFLASH" else {}
    algorithm, ids, params = head_of(target, name=name, **shape)
    shared = shared_of(target, ids)
    batches = Batches(store_of(folder, records).read(), range(len(records)), rows=32, unroll_steps=2, seed=3)
    schedule = Schedule(steps, rate=1e-3, warmup=0.2, decay=0.1, batches=2)
    objective = Objective(algorithm, 2, 0.8, mixed_precision=True)
    parallel = DataParallel(jax.devices()[:devices]) if devices > 1 else None
    return Trainer(objective, schedule, shared, params, parallel), batches


@pytest.mark.parametrize(("name", "devices"), [("EAGLE3", 1), ("EAGLE3", 4), ("DFLASH", 3)])
def test_resumed_run_takes_the_same_steps(tmp_path, name, devices):
    """devices: of the run that resumes; several of them share each step."""
    target = target_of(tmp_path / "target")
    rng = np.random.default_rng(0)
    records = [random_record(rng, int(n), 4) for n in rng.integers(10, 40, 20)]
    straight, batches = trainer_of(target, tmp_path / "a", records, name=name)
    stream, losses = batches.since(0), []
    for step in range(12):
        if step == 5:
            straight.save(tmp_path / "checkpoint", {"note": "x"})
        losses.append(straight.take_step(stream).losses)
    second, batches = trainer_of(target, tmp_path / "a2", records, name=name, devices=devices)
    assert second.load(tmp_path / "checkpoint")["note"] == "x"
    assert second.step == 5
    stream = batches.since(second.batches_taken)
    again = [second.take_step(stream).losses for _ in range(7)]
    np.testing.assert_allclose(again, losses[5:], rtol=0 if devices == 1 else 1e-4)
    for one, other in zip(jax.tree.leaves(straight.state), jax.tree.leaves(second.state), strict=True):
        assert len(other.devices()) == devices
        np.testing.assert_allclose(one, other, rtol=0, atol=0 if devices == 1 else 2e-4)


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    target = target_of(tmp_path / "target")
    trainer, batches = trainer_of(target, tmp_path / "a", [random_record(np.random.default_rng(0), 30, 4)])
    trainer.save(tmp_path / "checkpoint", {"note": "x"})
    trainer.take_step(batches.since(0))

    def write(_, part, *__):
        part.write_bytes(b"as much as there is room for")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(optimize, "save_file", write)
    with (
        pytest.raises(EngineFault, match="no room left on the disk of here; free some and start again"),
        reporting_full_disk("here"),
    ):
        trainer.save(tmp_path / "checkpoint", {"note": "y"})
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == [optimize.CHECKPOINT]
    assert trainer.load(tmp_path / "checkpoint")["note"] == "x"
    assert trainer.step == 0


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, EngineFault), (errno.EDQUOT, EngineFault), (errno.EIO, OSError)]
)
def test_full_disk_is_reported(models, monkeypatch, number, kind):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(app, "_train", fail)
    with pytest.raises(kind):
        app.train(TrainConfig(model_path=str(models / "target"), output="there"))


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH"])
def test_run_resumes_with_its_first_answers(tmp_path, monkeypatch, algorithm):
    """On another machine, where paths and the number of devices differ; another run may have added answers."""
    here, there = tmp_path / "here", tmp_path / "there"
    target_of(here / "target")
    rng = np.random.default_rng(0)
    records = [random_record(rng, 24, 4, held_out=i % 4 == 0) for i in range(12)]
    flags = {"draft_vocab_size": 64, "intermediate_size": 64, "batch_tokens": 60, "unroll": 2, "epochs": 1.0}
    flags |= {"algorithm": algorithm, "block_size": 3, "num_layers": 1, "aux_layers": (1, 3, 4)}
    store = store_of(here / "answers", records[:8])

    def run(base, store, **more):
        config = TrainConfig(model_path=str(base / "target"), checkpoint_seconds=0.0, **flags, **more)
        learning = TrainingRun(config, base / "target")
        learning.run(store, base / "checkpoint", app.settings(config))
        return learning

    take_step = Trainer.take_step

    def end(trainer, batches):
        if trainer.step == 1:
            raise InterruptedError
        return take_step(trainer, batches)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", end)
        with pytest.raises(InterruptedError):
            run(here, store)
    for job, record in enumerate(records[8:], start=8):
        store.add(job, [record])
    store.close()
    shutil.copytree(here, there)
    facts = []
    for base, devices in ((here, 1), (there, 2)):
        about = {"layers": [2, 4, 5]}
        learning = run(base, Store(base / "answers", about, records[0].rows.shape[1]), train_dp_size=devices)
        names = ("learnt_tokens", "answers", "steps", "vocabulary_coverage")
        facts.append([learning.facts[name] for name in names])
        assert learning.facts["steps"] > 1
        assert len(learning.reader) == 8
        assert len(learning.curve.losses[0]) == 2, "tokens that a row predicts"
    assert facts[0] == facts[1]
    (tmp_path / "fewer").mkdir()
    with pytest.raises(ConfigError, match="with other records"):
        run(there, store_of(tmp_path / "fewer", records[:6]))
    if algorithm == "EAGLE3":  # refused before the target writes other answers
        shutil.copytree(there / "checkpoint", there / "draft" / "checkpoint")
        config = TrainConfig(model_path=str(there / "target"), output=str(there / "draft"), **flags)
        with pytest.raises(ConfigError, match=r"learnt from 8 answers, and .*draft.answers holds 0; copy all"):
            app.train(config)


def test_diverged_training_ends_the_run(tmp_path):
    target = target_of(tmp_path / "target")
    store = store_of(tmp_path / "answers", [random_record(np.random.default_rng(0), 20, 4)])
    flags = {"draft_vocab_size": 64, "intermediate_size": 64, "unroll": 2, "batch_tokens": 60, "steps": 20}
    learning = TrainingRun(TrainConfig(model_path=str(target.folder), learning_rate=1e38, **flags), target.folder)
    with pytest.raises(EngineFault, match="lower --learning-rate"):
        learning.run(store, tmp_path / "checkpoint", {})


def test_a_checkpoint_of_another_head_is_refused(tmp_path):
    target = target_of(tmp_path / "target")
    records = [random_record(np.random.default_rng(0), 20, 4)]
    trainer, _ = trainer_of(target, tmp_path / "a", records)
    trainer.save(tmp_path / "checkpoint", {})
    algorithm, ids, params = head_of(target, vocab=48)
    objective = Objective(algorithm, 2, 0.8, mixed_precision=True)
    other = Trainer(objective, Schedule(5, 1e-3, 0.1, 0.1, 1), shared_of(target, ids), params)
    with pytest.raises(ConfigError, match="another head"):
        other.load(tmp_path / "checkpoint")


@pytest.mark.parametrize("name", ["EAGLE", "NEXTN", "STANDALONE", "DFLASH"])
def test_other_algorithms_are_trained_and_replayed(perfect, tmp_path, name):
    """The published draft predicts the cycle that the target generates."""
    folder = perfect[0]
    target, ids = read_target(folder), np.arange(VOCAB)
    hidden = 32 if name == "STANDALONE" else None
    layers = 1 if name == "DFLASH" else None
    algorithm = algorithm_of(name, target, DraftShape(layers, hidden, inner=64, vocab=VOCAB, block=6))
    uses_features, records = algorithm.model.head.uses_features, []
    for start in range(0, 32, 4):
        tokens = np.array([40 + start, *cycle_text(40 + start, 60)], np.uint32)
        states = np.tile(states_of_cycle(folder, tokens).view(np.uint16), (1, len(algorithm.states.layers) + 1))
        records.append(Record(tokens, states.view(np.uint8), 5, 5, 0.0, 7))
    reader, unroll_steps = store_of(tmp_path / "answers", records).read(), algorithm.depth or 3
    batches = Batches(reader, range(8), 512, unroll_steps, 1, uses_features)
    tensors = target.embedding_and_head(np.asarray)
    shared = TargetWeights(tensors["embed"], tensors["head"], draft_ids(ids, VOCAB))
    objective = Objective(algorithm, unroll_steps, 1.0, mixed_precision=False)
    params = algorithm.first_params(target, ids, np.ones(len(algorithm.states.layers) + 1, np.float32), seed=0)
    trainer, stream = Trainer(objective, Schedule(60, 1e-2, 0.1, 0.0, 1), shared, params), batches.since(0)
    for _ in range(60):
        trainer.take_step(stream)
    algorithm.publish(trainer.state.params, ids, tmp_path / "draft")
    scores = replay(name, tmp_path / "draft", folder, records[:2], CHAIN)
    assert scores[0.0].accept_length > 4
    if name == "DFLASH":
        assert json.loads((tmp_path / "draft" / "token_map.json").read_text()) == ids.tolist()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_block_drafter_begins_with_the_target_s_last_layers(tmp_path, kind):
    """Norms of queries and keys, which Llama lacks, leave their sizes; layers of another width are random."""
    target = read_target(write_model(tmp_path / "target", kind, num_hidden_layers=6))
    theirs = safetensors.numpy.load_file(target.folder / "model.safetensors")
    shape = DraftShape(layers=2, aux_layers=(1, 3))
    algorithm = algorithm_of("DFLASH", target, shape)
    params = algorithm.first_params(target, np.arange(VOCAB), np.ones(3, np.float32), seed=0)
    for i, own in enumerate(params["layers"], start=4):
        np.testing.assert_array_equal(own["down"], theirs[f"model.layers.{i}.mlp.down_proj.weight"].T)
        norm = theirs.get(f"model.layers.{i}.self_attn.q_norm.weight")
        if norm is not None:
            np.testing.assert_array_equal(own["q_norm"], norm)
        else:
            x = np.random.default_rng(1).standard_normal((500, target.hidden_size)).astype(np.float32)
            a = algorithm.model.layers[0].attention
            q = ((x * own["attention_norm"]) @ own["qkv"])[:, : a.heads * a.head_dim]
            assert float(own["q_norm"][0]) == pytest.approx(np.sqrt(np.mean(np.square(q))), rel=0.05)
    other = algorithm_of("DFLASH", target, replace(shape, inner=32))
    assert other.first_params(target, np.arange(VOCAB), np.ones(3, np.float32), 0)["layers"][0]["down"].shape[0] == 32


def test_a_small_decoder_gets_the_texts_of_its_target(tmp_path):
    target = target_of(tmp_path / "target")
    texts = {name: name for name in ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/rag.jinja")}
    (target.folder / "additional_chat_templates").mkdir()
    for name, content in texts.items():
        (target.folder / name).write_text(content)
    algorithm = algorithm_of("STANDALONE", target, DraftShape(hidden=32))
    ids = np.arange(target.vocab_size)
    params = algorithm.first_params(target, ids, np.ones(1, np.float32), seed=0)
    algorithm.publish(params, ids, tmp_path / "draft")
    assert {name: (tmp_path / "draft" / name).read_text() for name in texts} == texts


def test_oversized_vocabulary_is_refused_before_answers_are_generated(tmp_path):
    target = target_of(tmp_path / "target")
    with pytest.raises(ConfigError, match=f"--draft-vocab-size must lie between 1 and the target's {VOCAB}"):
        TrainingRun(TrainConfig(model_path=str(target.folder), draft_vocab_size=VOCAB + 1), target.folder)


# --- flags ---


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ({"tokens": 0}, "--tokens"), ({"unroll": 0}, "--unroll"), ({"held_out": 0.7}, "--held-out"),
        ({"learning_rate": 0.0}, "--learning-rate"), ({"temperature": (-1.0,)}, "--temperature"),
        ({"max_new_tokens": 2000}, "--max-length"), ({"data": ("/nowhere",)}, "no such file"),
        ({"aux_layers": (5, 2, 1)}, "--aux-layers"), ({"aux_layers": (1, 2, 8)}, "--aux-layers"),
        ({"answers": "SET"}, "answers to other settings"), ({"train_device": "cpu:99"}, "--train-device cpu:99 needs"),
    ],
)  # fmt: skip
def test_wrong_flags_are_refused(models, trained, tmp_path, flags, what):
    if flags.get("answers") == "SET":
        flags = {"answers": str(trained.with_name("draft.answers")), "max_new_tokens": 50}
    flags = FLAGS | {"model_path": str(models / "target"), "output": str(tmp_path / "out")} | flags
    with pytest.raises(ConfigError, match=what):
        app.train(TrainConfig(**flags))


def test_flags_become_a_configuration_and_back():
    import tyro

    config = TrainConfig(data=("a", "b"), temperature=(0.0, 0.7), aux_layers=(1, 2, 3), tokens=5)
    assert tyro.cli(TrainConfig, args=to_argv(config)) == config


def test_shapes_of_a_head(tmp_path):
    target = target_of(tmp_path)
    assert algorithm_of("EAGLE3", target, DraftShape()).model.layers[0].mlp.width == 96
    assert len(algorithm_of("EAGLE3", target, DraftShape(layers=3)).model.layers) == 3
    assert len(algorithm_of("STANDALONE", target, DraftShape()).model.layers) == 4
    assert algorithm_of("STANDALONE", target, DraftShape(hidden=32)).model.hidden_size == 32
    with pytest.raises(ConfigError, match="multiple of 64"):
        algorithm_of("STANDALONE", target, DraftShape(hidden=100))
    with pytest.raises(ConfigError, match="single layer"):
        algorithm_of("NEXTN", target, DraftShape(layers=2))


def test_training_continues_from_a_published_head(trained, models, tmp_path):
    """It starts with its old accept length, and keeps vocabulary and tensor names. Many are PyTorch files."""
    published = Path(shutil.copytree(trained, tmp_path / "published"))
    torch.save(safetensors.torch.load_file(published / "model.safetensors"), published / "pytorch_model.bin")
    (published / "model.safetensors").unlink()
    config = TrainConfig(
        model_path=str(models / "target"), output=str(tmp_path / "draft"), answers=str(trained) + ".answers",
        initial=str(published), **FLAGS | {"steps": 1, "learning_rate": 1e-6},
    )  # fmt: skip
    assert app.train(config) == 0

    def accept_length(folder):
        report = json.loads((folder / "training.json").read_text())
        return report["evaluation"]["chain"]["temperature 0"]["accept_length"]

    assert accept_length(tmp_path / "draft") == pytest.approx(accept_length(trained), rel=0.05)
    first = safetensors.numpy.load_file(trained / "model.safetensors")
    again = safetensors.numpy.load_file(tmp_path / "draft" / "model.safetensors")
    assert set(again) == set(first)
    np.testing.assert_array_equal(again["d2t"], first["d2t"])
    with pytest.raises(ConfigError, match="--initial is for EAGLE, EAGLE3, NEXTN"):
        app.train(replace(config, algorithm="STANDALONE", output=str(tmp_path / "other")))


def test_head_of_another_width_is_trained_with_its_own_embedding(tmp_path):
    target = target_of(tmp_path / "target")
    config, tensors = eagle3(target.folder, hidden=32, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4]})
    head = write_head(tmp_path / "head", config, tensors)
    rng = np.random.default_rng(0)
    store = store_of(tmp_path / "answers", [random_record(rng, 20, 4) for _ in range(4)])
    flags = TrainConfig(
        model_path=str(target.folder), initial=str(head), steps=1, unroll=2, batch_tokens=60, evaluate=0
    )
    learning = TrainingRun(flags, target.folder)
    learning.run(store, tmp_path / "checkpoint", {})
    np.testing.assert_allclose(learning.target_weights().embed, tensors["embed_tokens.weight"], rtol=1e-2)
    learning.publish(tmp_path / "draft")
    again = safetensors.numpy.load_file(tmp_path / "draft" / "model.safetensors")
    np.testing.assert_array_equal(again["embed_tokens.weight"], tensors["embed_tokens.weight"])
    assert again["fc.weight"].shape == (32, 3 * 48)


def test_training_goes_on_from_a_checkpoint_s_own_mtp_layer(tmp_path):
    """With experts, whose router's bias stays; the result is read, and drafts, as the published layer."""
    target = read_target(write_mtp(tmp_path / "target", "glm-4.5"))
    rng = np.random.default_rng(0)
    records = [random_record(rng, 20, 4, states=1) for _ in range(4)]
    flags = TrainConfig(
        model_path=str(target.folder), initial=str(target.folder), algorithm="NEXTN", steps=1, unroll=2,
        batch_tokens=60, evaluate=0, learning_rate=1e-2, draft_vocab_size=64,
    )  # fmt: skip
    learning = TrainingRun(flags, target.folder)
    learning.run(store_of(tmp_path / "answers", records), tmp_path / "checkpoint", {})
    learning.publish(tmp_path / "draft")
    first = safetensors.numpy.load_file(target.folder / "model.safetensors")
    again = safetensors.numpy.load_file(tmp_path / "draft" / "model.safetensors")
    bias = "model.layers.3.mlp.gate.e_score_correction_bias"
    copies = ("layers.3.embed_tokens.weight", "layers.3.shared_head.head.weight")
    assert again.keys() == {n for n in first if n.startswith("model.layers.3.") and not n.endswith(copies)}
    np.testing.assert_array_equal(again[bias], first[bias])
    for name in ("eh_proj.weight", "mlp.experts.3.down_proj.weight", "mlp.gate.weight"):
        moved = np.abs(again[f"model.layers.3.{name}"].astype(np.float32) - first[f"model.layers.3.{name}"])
        assert 1e-3 < moved.max() < 0.1
    scores = replay("NEXTN", tmp_path / "draft", target.folder, records[:1], CHAIN)
    assert scores[0.0].accept_length >= 1
