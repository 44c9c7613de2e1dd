"""A draft on the target's cores: one round of growth after each commit, in one program that ends it by itself."""

from dataclasses import replace

import numpy as np
import pytest

from outrider.config import DraftConfig
from outrider.speculation.sampling import SamplingParams
from services.draft.drafters.on_demand import ROUNDS, OnDemandDrafter, Pace
from services.draft.model.programs.runner import ModelRunner
from services.draft.process.weights import chosen_quantization
from tests.support.draft.helpers import (
    GREEDY,
    OracleTarget,
    commit_of,
    request,
    settle,
    standalone,
    torch_logits,
)
from tests.support.draft.trees import tree_of
from tests.support.tiny import VOCAB, write_model

PROMPT = np.random.default_rng(2).integers(4, VOCAB, 23).tolist()
SAMPLED = SamplingParams(temperature=0.9, seed=5)
LONG = 1e6  # a pace at which every round pays


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def on_demand(model):
    return standalone(model, draft_ahead="off", speculative_draft_model_quantization="unquant")


@pytest.fixture
def engine(on_demand, monkeypatch):
    """An engine whose every round pays."""
    monkeypatch.setattr(Pace, "levels", LONG)
    yield on_demand
    for session in list(on_demand.sessions):
        on_demand.close(session)
    on_demand.flush()


def begin(engine, number=1, prompt=PROMPT, sampling=GREEDY, **options):
    """A session whose target has committed its first token, with which it has the tokens of a prompt."""
    engine.open(request(number, prompt[:-1], sampling, **options))
    assert engine.idle, "the target is reading the prompt"
    engine.receive([], [commit_of(prompt[:-1], prompt[-1:], number)])


@pytest.fixture
def calls(monkeypatch):
    """The shapes of all programs that ran."""
    shapes = []
    run = ModelRunner._run
    monkeypatch.setattr(ModelRunner, "_run", lambda self, shape, *rest: shapes.append(shape) or run(self, shape, *rest))
    return shapes


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_one_program_grows_what_rounds_of_their_own_grow(model, engine, sampling, calls):
    assert isinstance(engine.drafter, OnDemandDrafter)
    ahead = standalone(model)
    begin(engine, sampling=sampling)
    ahead.open(request(1, PROMPT, sampling))
    for one in (engine, ahead):
        settle(one)
    found, expected = tree_of(engine, 1), tree_of(ahead, 1)
    assert max(map(len, found)) > 1
    shared = found.keys() & expected.keys()
    assert len(shared) > 10
    np.testing.assert_allclose([found[path] for path in shared], [expected[path] for path in shared], atol=1e-3)
    likely = sorted(expected, key=expected.get)[-5:]
    assert set(likely) <= found.keys()


def test_a_commit_gets_one_program_and_one_proposal_and_then_the_draft_rests(engine, calls):
    begin(engine)
    settle(engine)
    tokens = [*PROMPT]
    for new in ([7], [8, 9], [10]):
        calls.clear()
        engine.receive([], [commit_of(tokens, new)])
        tokens += new
        (output,) = settle(engine)
        (proposal,) = output.proposals
        assert max(proposal.parents) >= 0, "more than the root's children"
        assert [shape.tree for shape in calls] == [ROUNDS]
        assert engine.idle


def test_rounds_end_where_their_time_is_worth_more(engine, monkeypatch):
    """The faster the target's step, the fewer levels; at once where it takes no time."""
    expanded = []
    for number, pace in enumerate((LONG, 30.0, 1.0), start=1):
        monkeypatch.setattr(Pace, "levels", pace)
        begin(engine, number)
        settle(engine)
        expanded.append(len(engine.running[number].frontiers[-1].expanded))
    assert expanded[0] >= expanded[1] >= expanded[2] == 0
    assert expanded[0] > 2


def test_budgets_and_the_end_of_a_text_limit_rounds(engine):
    begin(engine, max_tokens=3)
    settle(engine)
    assert max(map(len, tree_of(engine, 1))) == 1
    begin(engine, 2)
    settle(engine)
    assert max(map(len, tree_of(engine, 2))) > 1
    engine.receive([], [replace(commit_of(PROMPT, [9], 2), draft_budget=1)])
    settle(engine)
    assert max(map(len, tree_of(engine, 2))) == 1


def test_a_long_prompt_is_read_in_chunks_that_leave_the_root_to_a_round(engine, calls):
    prompt = PROMPT * 7
    begin(engine, prompt=prompt)
    outputs = settle(engine)
    assert [shape.tree for shape in calls] == [None, None, None, ROUNDS]
    assert [bool(output.proposals) for output in outputs] == [False, False, False, True]
    assert engine.drafter.prefix_kvs[1].settled == len(prompt)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_its_proposals_are_accepted_by_a_target_of_the_same_weights(model, engine, sampling):
    """Rows of accepted nodes move into the prefix; with the same weights every chain is accepted."""
    sessions = [request(number, PROMPT[number:], sampling) for number in range(3)]
    targets = [OracleTarget(torch_logits(model), one, budget=4) for one in sessions]
    for one in sessions:
        engine.open(one)
    engine.receive([], [target.step() for target in targets])
    for _ in range(5):
        for output in settle(engine):
            for target in targets:
                target.hear(output)
        engine.receive([], [target.step() for target in targets])
    assert sum(target.accepted for target in targets) > 0.5 * sum(target.verified > 0 for target in targets) * 5
    assert not any(target.unknown for target in targets)


def test_its_weights_have_four_bits_unless_a_flag_says_more(model):
    """The time of such a draft is the target's, and no text depends on its precision."""
    config = DraftConfig(draft_ahead="off")
    assert chosen_quantization(config, "cpu") == "int4"
    assert chosen_quantization(config, "plain") is None
    assert chosen_quantization(replace(config, speculative_draft_model_quantization="int8"), "cpu") == "int8"
    assert chosen_quantization(DraftConfig(), "cpu") is None
    engine = standalone(model, draft_ahead="off", draft_dtype="bfloat16")
    layer, head = engine.drafter.runner.params["layers"][0], engine.drafter.runner.params["head"]
    assert all(layer[name].data.dtype == np.int8 for name in ("qkv", "output", "gate_up", "down"))
    assert head.data.dtype == np.uint8
    begin(engine)
    assert any(output.proposals for output in settle(engine))


def test_the_pace_is_the_targets_step_in_levels():
    pace = Pace()
    first = pace.levels
    now = 0.0
    for _ in range(40):
        pace.add_round([1], levels=4, seconds=0.020, now=now)
        now += 0.050
        pace.committed(1, now)
        pace.committed(1, now + 1.0)  # no round before it
    assert pace.levels == pytest.approx(1 + 0.050 / 0.005)
    assert first != pace.levels
    pace.add_round([1], 4, 0.020, now)
    pace.committed(1, now + 60.0)  # a pause
    assert pace.levels == pytest.approx(1 + 0.050 / 0.005)
