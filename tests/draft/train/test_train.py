"""A whole training run: a target generates, a head is trained, the published head serves, and the text is unchanged."""

import asyncio
import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from outrider.checkpoints import checkpoint
from outrider.config import DraftConfig, TrainConfig
from outrider.errors import ConfigError, EngineFault
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.serving.features import FeatureFormat, decode
from services.draft.drafters.feature import FeatureDrafter
from services.draft.formats.target import read_target
from services.draft.learning.algorithms import DraftShape, algorithm_of
from services.draft.learning.objective import Objective, TargetWeights
from services.draft.learning.optimize import Schedule, Trainer
from services.draft.learning.records.batches import Batches
from services.draft.learning.records.store import Record, Store
from services.draft.learning.records.vocabulary import draft_ids
from services.draft.process.app import build
from services.draft.train import app
from services.draft.train.data.writing import open_store, write_answers
from services.draft.train.evaluate import CHAIN, replay
from services.draft.train.run import TrainingRun
from tests.support.checkpoints.perfect import cycle_text, write_cyclic_target
from tests.support.draft.training import random_record, states_of_cycle, store_of, target_of
from tests.support.gateway.services import Gateway
from tests.support.system.services import draft_service, target_service
from tests.support.tiny import VOCAB, write_tokenizer

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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, EngineFault), (errno.EDQUOT, EngineFault), (errno.EIO, OSError)]
)
def test_full_disk_is_reported(models, monkeypatch, number, kind):
    def fail(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(app, "_train", fail)
    with pytest.raises(kind):
        app.train(TrainConfig(model_path=str(models / "target"), output="there"))


def test_diverged_training_ends_the_run(tmp_path):
    target = target_of(tmp_path / "target")
    store = store_of(tmp_path / "answers", [random_record(np.random.default_rng(0), 20, 4)])
    flags = {"draft_vocab_size": 64, "intermediate_size": 64, "unroll": 2, "batch_tokens": 60, "steps": 20}
    learning = TrainingRun(TrainConfig(model_path=str(target.folder), learning_rate=1e38, **flags), target.folder)
    with pytest.raises(EngineFault, match="lower --learning-rate"):
        learning.run(store, tmp_path / "checkpoint", {})


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.long) for name in ("EAGLE", "NEXTN")), "STANDALONE", "DFLASH"]
)
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
