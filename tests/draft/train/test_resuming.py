"""Training that stops and goes on: the same steps, the last checkpoint, the first answers."""

import shutil

import jax
import numpy as np
import pytest
from safetensors import SafetensorError

from outrider.config import TrainConfig
from outrider.errors import ConfigError, EngineFault
from services.draft.learning import optimize
from services.draft.learning.data_parallel import DataParallel
from services.draft.learning.objective import Objective
from services.draft.learning.optimize import Schedule, Trainer
from services.draft.learning.records.batches import Batches
from services.draft.learning.records.disk import reporting_full_disk
from services.draft.learning.records.store import Store
from services.draft.train import app
from services.draft.train.run import TrainingRun
from tests.support.draft.training import head_of, random_record, shared_of, store_of, target_of


def trainer_of(target, folder, records, steps=12, name="EAGLE3", devices=1):
    shape = {"block": 3, "layers": 1, "aux_layers": (1, 3, 4)} if name == "DFLASH" else {}
    algorithm, ids, params = head_of(target, name=name, **shape)
    shared = shared_of(target, ids)
    batches = Batches(store_of(folder, records).read(), range(len(records)), rows=32, unroll_steps=2, seed=3)
    schedule = Schedule(steps, rate=1e-3, warmup=0.2, decay=0.1, batches=2)
    objective = Objective(algorithm, 2, 0.8, mixed_precision=True)
    parallel = DataParallel(jax.devices()[:devices]) if devices > 1 else None
    return Trainer(objective, schedule, shared, params, parallel), batches


@pytest.mark.parametrize(
    ("name", "devices"), [("EAGLE3", 1), ("EAGLE3", 4), pytest.param("DFLASH", 3, marks=pytest.mark.long)]
)
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


@pytest.mark.parametrize("algorithm", ["EAGLE3", pytest.param("DFLASH", marks=pytest.mark.long)])
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
