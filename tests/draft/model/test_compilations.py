"""Nothing is compiled while serving: the warm-up covers all programs, and others are counted and logged."""

import logging

import jax
import numpy as np
import pytest
import torch

from outrider.wire import codec
from services.draft.model.programs.compilations import Compilations
from services.draft.sessions.batch import StepShape
from tests.support.checkpoints.heads import eagle, eagle3, write_head
from tests.support.checkpoints.perfect import write_perfect_mtp
from tests.support.draft.helpers import request, settle, standalone
from tests.support.invariance.engines import draft_engine, target_engine
from tests.support.invariance.pair import Faults, Pair
from tests.support.invariance.pair import request as session
from tests.support.tiny import VOCAB, write_model

# One that is fed in several chunks, one that is fed in a round of growth, and some between.
LENGTHS = [150, 3, 70, 30]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    target = write_model(base / "target", seed=1, num_hidden_layers=1)
    write_head(base / "eagle", *eagle(target))
    write_head(base / "eagle3", *eagle3(target, eagle_config={"eagle_aux_hidden_state_layer_ids": [0]}, states=1))
    torch.save([*range(4, 200), 1], base / "map.pt")
    write_perfect_mtp(base / "stacked", "feature", 3)
    return base


# The drafters of the invariance tests are watched there; these differ in what they compile.
KINDS = {
    "standalone, beside ngram, mapped": ("STANDALONE", "target", {"beside": True, "speculative_token_map": "map.pt"}),
    "eagle": ("EAGLE", "eagle", {}),
    "eagle 3, tree beside ngram": ("EAGLE3", "eagle3", {"tree": (3, 2, 6), "beside": True}),
    "stacked nextn": ("NEXTN", None, {"of": "stacked"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_while_serving(folders, kind):
    """Long prompts, both temperatures, lost messages, pages for two sessions of four, and moves that fit no round."""
    algorithm, folder, options = KINDS[kind]
    options = dict(options)
    of = folders / options.pop("of", "target")
    if "speculative_token_map" in options:
        options["speculative_token_map"] = str(folders / options["speculative_token_map"])
    jax.clear_caches()
    draft = draft_engine(
        algorithm, folders / folder if folder else None, of, max_running=3, draft_max_total_tokens=400, **options
    )
    runner = draft.drafter.runner
    assert runner.compilations.total > 3
    target = target_engine(of, max_step_tokens=48)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, VOCAB, length).tolist() for length in LENGTHS]
    todo = [session(i, prompt, temperature=i % 2, max_tokens=24) for i, prompt in enumerate(prompts)]
    run = Pair(target, lambda: draft, Faults(lost=0.03, doubled=0.2)).run(todo)
    assert run.tokens == Pair(target).run(todo).tokens
    assert run.verified > 0
    runner.move([(0, 0)] * 100)
    assert draft.load().compilations == 0


def test_late_compilations_are_counted_and_logged(folders, caplog):
    jax.clear_caches()
    engine = standalone(folders / "target", max_running_requests=1)
    engine.drafter.set_expansion_shapes([StepShape(1, 4, 4)])
    engine.drafter.warm_up()
    assert engine.load().compilations == 0
    engine.drafter.set_expansion_shapes([StepShape(1, 5, 5)])
    with caplog.at_level(logging.WARNING):
        engine.open(request(1, [5, 6, 7]))
        settle(engine)
    compiled = engine.load().compilations  # the step, and what its inputs are made by
    assert compiled >= 1
    assert codec.load_from_pb(codec.load_to_pb(engine.load())).compilations == compiled
    assert "compiled while serving" in caplog.text
    assert "a step of 1 x 5 rows" in caplog.text


def test_small_functions_are_counted():
    compilations = Compilations()
    compilations.serve()
    jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compilations.total == compilations.while_serving == 1


def test_progress_is_reported_before_every_shape(folders):
    engine = standalone(folders / "target", max_running_requests=1)
    reported = []
    engine.drafter.warm_up(lambda *parts: reported.append(parts))
    assert reported == [(i, 4) for i in range(1, 5)]
