"""The analysis of a head's limits: its trees are those of the draft engine, and each limit taken away helps."""

import json
from functools import partial

import numpy as np
import pytest

from bench.gpu.train import sharpen, walk
from bench.harness import report
from bench.harness.report import Report
from bench.limits.growth import Answer, Grower, Policy, read_head
from bench.limits.run import LIMITS, POLICIES, limits_of, measure
from bench.limits.walks import Walks
from outrider.config import DraftConfig
from outrider.speculation.shape import TreeShape
from services.draft.learning.records.store import Record
from services.draft.train import evaluate
from services.draft.train.evaluate import replay
from tests.support.checkpoints.heads import eagle3, write_head
from tests.support.checkpoints.perfect import cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.training import random_record, states_of_cycle, target_of

TREE = TreeShape(3, 3, 7)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A target, and random heads with one layer and two, each with random answers of its tokens."""
    base = tmp_path_factory.mktemp("heads")
    target, rng = target_of(base / "target"), np.random.default_rng(4)
    made = {}
    for layers in (1, 2):
        config, tensors = eagle3(target.folder, layers=layers, vocab=24)
        ids = np.append(tensors["d2t"] + np.arange(24), 0)
        made[layers] = (
            write_head(base / f"{layers}", config, tensors),
            [
                random_record(rng, 90, 5, ids=ids, temperature=temperature, seed=seed)
                for seed, temperature in enumerate((0.0, 1.0, 1.0))
            ],
        )
    return target.folder, made


@pytest.mark.long
@pytest.mark.parametrize("layers", [1, 2])
def test_trees_are_those_of_the_draft_engine(heads, layers, monkeypatch):
    monkeypatch.setattr(
        evaluate, "DraftConfig", partial(DraftConfig, draft_dtype="float32")
    )  # as the analysis computes
    target, made = heads
    folder, records = made[layers]
    scores = replay("EAGLE3", folder, target, records, TREE)
    grower = Grower(read_head(folder, target))
    found: dict[float, Walks] = {}
    for record in records:
        found.setdefault(record.temperature, Walks()).add("a", grower.trees(Answer(record, 3), Policy(TREE)).chosen)
    for temperature, score in scores.items():
        counts = np.sum(found[temperature].counts, axis=0).tolist()
        assert counts == [score.tokens, score.steps]
        assert score.steps < score.tokens, "some draft tokens were accepted"


def test_each_limit_taken_away_accepts_more(heads):
    target, made = heads
    folder, records = made[1]
    grower = Grower(read_head(folder, target))
    for record in records[:2]:
        answer = Answer(record, TREE.steps)
        accepted, ranks = limits_of(grower, answer, TREE)
        assert list(accepted) == list(LIMITS)
        assert (accepted["tree"] <= accepted["candidates"]).all()
        assert (accepted["candidates"] <= accepted["beam"]).all()
        assert (accepted["own states"] <= accepted["ranking"]).all()
        assert (accepted["ranking"] <= accepted["vocabulary"]).all()
        np.testing.assert_array_equal(ranks.own[:, 0], ranks.true[:, 0])
        np.testing.assert_array_equal(ranks.true[:-1, 1], ranks.true[1:, 0])


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    base = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(base / "target")
    tokens = np.array([60, *cycle_text(60, 60)], np.uint32)
    rows = np.tile(states_of_cycle(target, tokens).view(np.uint16), (1, 4)).view(np.uint8)
    return target, write_perfect_eagle3(base / "head", target), Record(tokens, rows, 5, 5, 0.0, 7)


def test_a_perfect_head_has_no_limit_but_its_depth(perfect, tmp_path):
    target, head, record = perfect
    report.set_folder(tmp_path)
    made = Report("limits", "")
    try:
        measure(made, Grower(read_head(head, target)), [(record, "a")], {"8": POLICIES["8 steps, 6 children"]})
        made.write()
    finally:
        report.set_folder(None)
    rows = json.loads((tmp_path / "limits.json").read_text())["rows"]
    depth = (len(record.tokens) - 6) / -(-(len(record.tokens) - 6) // 7)
    assert [(row["limit"], row["a"]) for row in rows] == [(name, pytest.approx(depth)) for name in LIMITS]
    shares, trees = dict(made.more).values()
    assert {share for row in shares for share in list(row.values())[3:]} == {1.0}
    assert trees[0]["all"] == pytest.approx(55 / 7)


def test_sharpening_scales_the_logits_alone(perfect, tmp_path):
    target, head, record = perfect
    folder = tmp_path / "head"
    folder.mkdir()
    for file in head.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    before = read_head(folder, target)
    sharpen(folder / "model.safetensors", 1.35)
    after = read_head(folder, target)
    np.testing.assert_allclose(after.params["head"], 1.35 * before.params["head"], rtol=0.02)
    np.testing.assert_array_equal(after.params["norm"], before.params["norm"])
    assert walk(Grower(after), [record], 1.0)[0.0].counts == walk(Grower(before), [record], 1.35)[0.0].counts
