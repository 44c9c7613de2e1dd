"""Rounds of guesses and their verification in one go: what a round at a time would have said, and no other text."""

import os
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from outrider.serving.features import FeatureSpec
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from services.target.speculation.mode_selector import SpeculationMode
from services.target.speculation.sources import local_eagle_head as headdraft
from services.target.speculation.sources.base import Offer
from services.target.step.programs import DraftTokenValue
from tests.support.checkpoints.heads import write_pair
from tests.support.checkpoints.perfect import CYCLE, cycle_text, write_cyclic_target, write_perfect_eagle3
from tests.support.draft.twin import Twin
from tests.support.target.driving import engine_of, opening, run
from tests.support.tiny import VOCAB
from tests.target.speculation.test_local_eagle_head import LAYERS, check_guesses, drafting, exact, with_head
from tests.target.speculation.test_multi_step import Resting

pytestmark = [pytest.mark.threads, pytest.mark.skipif(not library.available(), reason="heads are of compiled programs")]

__all__ = ["exact"]
LONG = 60.0  # seconds in which tokens gather


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), "EAGLE3", eagle_aux_hidden_state_layer_ids=LAYERS)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory):
    folder = tmp_path_factory.mktemp("perfect")
    target = write_cyclic_target(folder / "target")
    return with_head(target, write_perfect_eagle3(folder / "head", target))


def watched(engine):
    """The rounds of all that the engine does from now on, a list for each time it came back."""
    told, learn = [], engine.speculation.chooser.source.observe_loop
    engine.speculation.chooser.source.observe_loop = lambda *args, **more: (
        told.append(list(args[1])) or learn(*args, **more)
    )
    return told


@contextmanager
def calling(engine):
    """Somebody calls an engine, until what is yielded is called."""
    read, write = os.pipe()
    os.write(write, b"!")

    @contextmanager
    def listen():
        yield (read,)

    engine.message_files = listen
    yield lambda: os.read(read, 1)
    os.close(read)
    os.close(write)


def unlearning(engine, worth):
    """What guesses are worth stays as it is told, so that two engines choose alike."""
    chains = engine.speculation.chooser.source
    chains._value = lambda *_: worth
    chains.acceptance.observe = chains.second_acceptance.observe = lambda *_, **__: None
    chains.acceptance.table[:] = chains.second_acceptance.table[:] = type(chains.acceptance.table)(
        "f", np.linspace(0.3, 0.98, 32)
    )
    return engine


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [0.001, 0.03, 0.2])
def test_a_round_verifies_what_a_step_would(pair, monkeypatch, temperature, row):
    """Chains, second guesses and what the head says of them, round by round beside an engine that guesses in Python."""
    monkeypatch.setattr(headdraft, "_MAX_ITERATIONS", 1)
    target, folder, _ = pair
    model, worth = with_head(target, folder), DraftTokenValue(0.6, 1.0, row, 0.01)
    plainly, in_rounds = unlearning(drafting(model), worth), unlearning(drafting(model, coalesce_seconds=LONG), worth)
    request = opening(1, [5, 6, 7, 8], SamplingParams(temperature, seed=3), max_tokens=120)
    told, shapes = watched(in_rounds), set()
    for engine in (plainly, in_rounds):
        engine.open(request)
        engine.step()
    while not plainly.idle:
        plan, verified = plainly.speculation.chooser.source.draft, []
        plainly.speculation.chooser.source.draft = lambda *args, plan=plan, to=verified: (
            to.append(plan(*args)) or to[-1]
        )
        commit = plainly.step().commits[0]
        plainly.speculation.chooser.source.draft = plan
        said = in_rounds.step().commits[0]
        assert (said.tokens.tolist(), said.accepted) == (commit.tokens.tolist(), commit.accepted)
        draft = verified[0].get(1) if verified else None
        if draft is None:  # a token is left: no guess has a place
            continue
        (one,) = told[-1]
        chain = int((draft.parents == np.arange(-1, len(draft) - 1)).cumprod().sum())
        assert (one.chain, len(one.alternatives)) == (chain, len(draft) - chain)
        assert [place - 1 for place in one.alternatives] == draft.parents[chain:].tolist()
        shapes.add((one.chain, len(one.alternatives)))
    assert len(shapes) > (1 if row < 0.2 else 0)
    assert in_rounds.idle


def test_thresholds_have_a_round_at_a_time(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG, speculative_accept_threshold_single=0.9)
    told = watched(engine)
    found = run(engine, [opening(1, CYCLE[:3], SamplingParams(1.0, seed=1), max_tokens=40)])
    assert len(found.new[1]) == 40
    assert found.accepted > 0
    assert not told


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_texts_and_ends_are_those_of_plain_steps(pair, temperature, page_size):
    """Guesses of a random head, right and wrong, second ones among them; ends by length and by a stop token."""
    target, folder, _ = pair
    model = with_head(target, folder)
    rng = np.random.default_rng(4)
    for i, count in enumerate((1, 2, 3, 7, 40, 90), 1):
        prompt = rng.integers(3, VOCAB, 5 * i).tolist()
        request = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count)
        expected = run(engine_of(model, page_size=page_size), [request])
        engine = drafting(model, page_size=page_size, coalesce_seconds=LONG)
        told = watched(engine)
        found = run(engine, [request])
        assert (found.new, found.reasons) == (expected.new, expected.reasons)
        assert count < 40 or max(map(len, told)) > 1
        stop = expected.new[i][count // 2]
        ended = opening(i, prompt, SamplingParams(temperature, seed=i), max_tokens=count, stop_token_ids=(stop,))
        found = run(drafting(model, page_size=page_size, coalesce_seconds=LONG), [ended])
        assert found.new[i] == expected.new[i][: expected.new[i].index(stop) + 1]
        assert found.reasons[i] == FinishReason.STOP


def test_what_can_be_known_is_known(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    told = watched(engine)
    found = run(engine, [opening(1, [int(CYCLE[3])] * 20, max_tokens=300)])
    assert found.new[1] == cycle_text(int(CYCLE[3]), 300)
    assert found.accepted > 260
    assert found.steps < 20, "eight rounds at a time"
    rounds = [one for some in told for one in some]
    assert sum(one.committed for one in rounds) == 299, "all but the prompt's own token"
    assert sum(one.accepted for one in rounds) == found.accepted
    said = [(len(commit.tokens), commit.verified, commit.accepted) for commit in found.commits[1][1:]]
    assert said == [(one.committed, one.verified, one.accepted) for one in rounds], "a commit a round, as of a step"
    assert all(one.draft_seconds > 0 and one.verify_seconds > 0 for one in rounds)


def test_rounds_end_when_somebody_calls_and_when_it_is_time(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    told = watched(engine)
    with calling(engine) as hang_up:
        engine.open(opening(1, [int(CYCLE[3])] * 20, max_tokens=600))
        for _ in range(3):
            engine.step()
        assert [len(some) for some in told] == [1, 1]
        hang_up()
        engine.step()
        assert len(told[-1]) == headdraft._MAX_ITERATIONS
        engine.speculation.multi_step.window = 1e-9
        engine.step()
        assert len(told[-1]) == 1


def test_rounds_end_where_the_text_repeats(perfect):
    engine = drafting(perfect, coalesce_seconds=LONG)
    told = watched(engine)
    engine.open(opening(1, [int(CYCLE[3])] * 20, max_tokens=600))
    engine.step()
    chooser = engine.speculation.chooser
    chooser.looks_up, chooser.lookup.min_match = True, 2  # tokens: from the second lap of the cycle on
    chooser.judge_lookup, chooser.lookup.offer = lambda *_: None, lambda _: Offer(0.0, {})
    while len(told) < 40 and not engine.idle:
        engine.step()
    assert len(told[0]) > 1
    assert {len(some) for some in told[2:]} == {1}


@pytest.mark.usefixtures("exact")
def test_the_head_knows_what_it_has_written(pair):
    """Behind rounds it guesses as its twin does, from rows that it wrote in them, its own and another session's."""
    target, folder, made = pair
    twin = Twin.of("EAGLE3", *made, target)
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    rows, prompt = engine.speculation.chooser.source.rows, [5, 6, 7] * 9
    engine.open(opening(1, prompt, max_tokens=100))
    text = [*prompt]
    for _ in range(3):
        text += [token for commit in engine.step().commits for token in commit.tokens.tolist()]
    assert rows._known[1] > len(prompt) + 4
    assert len(text) - 20 < rows._known[1] < len(text) - 1
    engine.speculation.multi_step.window = 0.0
    assert check_guesses(twin, engine)[1] > 0
    engine.abort()
    engine.step()  # tells of it
    engine.open(opening(2, text[:-4], max_tokens=20))
    engine.step()
    assert rows._known[2] >= 16, "pages of the first session, which its head has written"
    assert check_guesses(twin, engine)[1] > 0


def test_who_is_not_alone_is_verified_step_by_step(pair):
    target, folder, _ = pair
    model = with_head(target, folder)
    engine = drafting(model, coalesce_seconds=LONG)
    told = watched(engine)
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in (1, 2)]
    for request in requests:
        engine.open(request)
    for _ in range(5):
        engine.step()
    assert not told
    engine.close(2)
    engine.step()
    assert len(told) == 1
    engine.close(1)
    penalized = replace(requests[0], sampling=SamplingParams(1.0, seed=1, presence_penalty=1.0))
    assert run(engine, [penalized]).new == run(engine_of(model), [penalized]).new
    assert len(told) == 1, "penalties change with every token"


def test_hidden_states_are_not_lost(pair):
    """Where a drafter wants the states of all tokens, rounds would keep none; so there are none."""
    target, folder, _ = pair
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    told = watched(engine)
    engine.features.configure(7, FeatureSpec((0, 1), final=True), b"")
    engine.open(replace(opening(1, list(range(4, 30)), max_tokens=40), feature_spec=7))
    engine.speculation.policy = policy = Resting()  # the drafter does
    policy.mode = SpeculationMode.SELF_SPECULATE
    rows = tokens = 0
    while not engine.idle:
        output = engine.step()
        tokens += sum(len(commit.tokens) for commit in output.commits)
        rows += sum(len(block.rows) for block in output.features)
        if tokens > 30:  # it wants them now
            policy.mode, policy.drafting_paused, policy.without_drafts = SpeculationMode.DRAFT_IF_READY, False, False
    assert tokens == 40
    assert rows >= 26 + 40 - 2, "of each token but the last"
    assert not told


def test_undrawable_tokens_end_the_session_alone(pair):
    target, folder, _ = pair
    engine = drafting(with_head(target, folder), coalesce_seconds=LONG)
    engine.open(opening(1, [5, 6, 7], max_tokens=40))
    engine.step()
    engine.cache.keys[0].fill_(float("nan"))
    failures = engine.step().failures
    assert [failure.session_id for failure in failures] == [1]
    assert "not finite" in str(failures[0].error)
    engine.check()
