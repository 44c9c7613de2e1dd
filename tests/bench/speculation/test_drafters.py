"""The benchmark of drafters: columns of states, settings, and a replay whose proposals are timed."""

import json

import numpy as np
import pytest

from bench.speculation import drafters
from bench.speculation.drafter_replay import Request, columns, measure
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.draft.learning.records.store import Record, Store
from tests.support.checkpoints.perfect import cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.training import states_of_cycle


def test_a_drafter_gets_the_states_that_it_reads():
    assert columns(FeatureSpec((2, 5)), [2, 4, 5], 8, 12) == [0, 1, 2, 6, 7, 8, 9, 10, 11]
    assert columns(FeatureSpec(final=True), [2, 4, 5], 8, 12) == [9, 10, 11]
    assert columns(FeatureSpec(), [2, 4, 5], 8, 8) == [*range(8)]
    with pytest.raises(ConfigError, match=r"reads layers 2 of the target.*--aux-layers"):
        columns(FeatureSpec((3, 5)), [2, 4, 5], 8, 12)


def test_settings_of_a_drafter():
    own = ("--speculative-algorithm", "DFLASH", "--speculative-always")
    trees = dict(drafters.settings_of(own, [(2, 8), (6, 6)], 16))
    count = ["--speculative-num-draft-tokens", "16"]
    assert trees["6/6"] == [*own[:2], "--speculative-num-steps", "6", "--speculative-eagle-topk", "6", *count]
    assert list(trees) == ["2/8", "6/6"]
    assert dict(drafters.settings_of(drafters.DRAFTERS["NGRAM"], [(2, 8)], 16)) == {
        "its own": [*drafters.DRAFTERS["NGRAM"], *count]
    }
    fixed = [*own[:2], "--speculative-num-steps", "3", *count]
    assert dict(drafters.settings_of(fixed, [(2, 8)], 16)) == {"its own": fixed}


def test_proposals_of_a_perfect_head_are_timed(tmp_path):
    target = write_cyclic_target(tmp_path / "target")
    head = write_perfect_eagle3(tmp_path / "head", target)
    tokens = np.array([60, *cycle_text(60, 40)], np.uint32)
    states = np.tile(states_of_cycle(target, tokens).view(np.uint16), (1, 4)).view(np.uint8)
    store = Store(tmp_path / "answers", {"layers": [2, 4, 5], "final": True}, states.shape[1])
    for job, temperature in enumerate((0.0, 1.0, 0.5)):
        store.add(job, [Record(tokens, states, 5, 5, temperature, 7)])
    store.close()
    tree = ["--speculative-num-steps", "5", "--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "8"]
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head), *tree]
    found = measure(Request(flags, str(target), str(tmp_path / "answers"), jobs=[0, 1]))
    assert found.accept == {"0": pytest.approx(35 / 6), "1": pytest.approx(35 / 6)}
    assert found.passes == 5
    assert found.weights > 0
    assert 0 < found.seconds[0] <= found.seconds[1]
    json.dumps(found.seconds)
