"""Overlap: texts equal those of steps in turn. Overlap is for CUDA devices; these tests switch it on on the CPU."""

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.serving.loop import EngineLoop
from outrider.serving.messages import Grammar, GrammarKind, Message
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.model.cuda.graphs import GraphRunner, direct
from services.target.process.control import Control, Update
from services.target.process.warmup import warm_up
from services.target.sampling import sampler
from services.target.speculation.budget import Budget
from services.target.speculation.estimates.step_cost import StepCost
from services.target.step.batch import DeferredRoots, build
from tests.support.target.cuda.graphs import CPU, history, modules
from tests.support.target.driving import (
    chain,
    counting,
    engine_of,
    load_model,
    opening,
    preparing_engine,
    random_tree,
    run,
    spoiled_roots,
)
from tests.support.target.proposals import Drafts
from tests.support.target.works import random_works
from tests.support.tiny import VOCAB, write_model, write_tokenizer

EXPENSIVE = Budget(StepCost({rows: 10.0**rows for rows in range(1, 10)}))  # where no draft token pays


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("model"), seed=1))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def overlapping(model, **flags):
    """An engine whose steps overlap. behind: steps that were launched before the one before them was read."""
    engine = engine_of(model, **flags)
    assert not engine.overlap
    engine.overlap = True
    return counting(engine, "launch_behind", "behind")


def sessions(count, temperature=1.0, seed=0, max_tokens=None, stops=12):
    """Sessions of different lengths; some end by a stop token, some by max_tokens."""
    rng = np.random.default_rng(seed)
    for i in range(1, count + 1):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 70)).tolist()
        params = SamplingParams(temperature, seed=i, top_p=[1.0, 0.9][i % 2], top_k=[0, 0, 40][i % 3])
        ids = tuple(rng.integers(3, VOCAB, stops).tolist())
        most = max_tokens or int(rng.integers(1, 40))
        yield opening(i, prompt, params, max_tokens=most, stop_token_ids=ids, min_tokens=min(i % 4, most))


def alone(model, requests):
    """The text of each session alone in an engine without overlap."""
    return {request.session_id: run(engine_of(model), [request]).new[request.session_id] for request in requests}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "flags",
    [{}, {"page_size": 1, "chunked_prefill_size": 9}, {"max_running_requests": 3}, {"disable_radix_cache": True}],
)
def test_texts_and_finish_reasons_equal_steps_in_turn(model, temperature, flags):
    requests = list(sessions(9, temperature))
    expected = run(engine_of(model, **flags), requests)
    engine = overlapping(model, **flags)
    found = run(engine, requests)
    assert (found.new, found.reasons) == (expected.new, expected.reasons)
    assert set(found.reasons.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert engine.behind > found.steps / 2
    assert found.steps <= expected.steps + len(requests)  # a session leaves the batch once its end was read


def test_no_preemption_for_a_session_that_may_have_ended(model):
    requests = [opening(i, [4 + i] * 9, SamplingParams(1.0, seed=i), max_tokens=30) for i in range(6)]
    expected = alone(model, requests)
    engine = overlapping(model, page_size=4, max_total_tokens=72)
    assert run(engine, requests).new == expected
    assert engine.scheduler.preemptions > 0
    assert engine.behind > 10


class Traffic:
    """Opens and closes sessions at random, now and then updates weights or pauses, and checks all commits."""

    def __init__(self, engine, control, requests, seed, proposals=None):
        self.engine, self.control, self.random = engine, control, np.random.default_rng(seed)
        self.waiting, self.tokens, self.ended = list(requests), {}, set()
        self.requests = {request.session_id: request for request in requests}
        self.proposals = proposals

    def run(self):
        engine = self.engine
        while self.waiting or not engine.idle:
            if self.waiting and (engine.idle or self.random.random() < 0.4):
                self.open(self.waiting.pop())
            if self.random.random() < 0.06:
                self.disturb()
            for i in self.alive if self.proposals else ():
                engine.receive(self.proposals(i, self.requests[i].tokens.tolist() + self.tokens[i]), ())
            self.follow(engine.step())
            engine.check()
        engine.scheduler.allocator.check(expected_leased=0)
        return {i: tokens for i, tokens in self.tokens.items() if i in self.ended}

    def open(self, request):
        self.engine.open(request)
        self.tokens[request.session_id] = []

    @property
    def alive(self):
        return [i for i in self.tokens if i not in self.ended]

    def disturb(self):
        alive = self.alive
        kind = self.random.integers(0, 5)
        if kind == 0 and alive:  # the client disconnects
            self.engine.close(int(self.random.choice(alive)))
        elif kind == 1 and alive:  # the client reconnects with the same id and the text so far
            i = int(self.random.choice(alive))
            request = self.requests[i]
            tokens = np.concatenate([request.tokens, np.array(self.tokens[i], np.uint32)])
            if len(self.tokens[i]) < request.stop.max_tokens:
                self.engine.open(replace(request, tokens=tokens))
        elif kind == 2:
            self.control.pause("retract" if self.random.random() < 0.5 else "in_place")
            if not self.engine.idle:  # pending output
                self.follow(self.engine.step())
            assert self.engine.idle
            self.control.proceed()
        elif kind == 3:
            folder = self.control.read_folder(str(self.control.folder))
            self.control.update_from_folder(folder, Update())
        else:
            for i in alive:
                self.engine.receive(
                    [random_tree(self.random, i, self.requests[i].tokens.tolist() + self.tokens[i], VOCAB, 4)], ()
                )

    def follow(self, output):
        assert not output.failures
        for commit in output.commits:
            request = self.requests[commit.session_id]
            assert commit.base_length == len(request.tokens) + len(self.tokens[commit.session_id])
            self.tokens[commit.session_id] += commit.tokens.tolist()
            if commit.finish_reason != FinishReason.RUNNING:
                assert commit.finish_reason != FinishReason.ABORT
                self.ended.add(commit.session_id)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_random_traffic(folder, model, seed, asynchronous, monkeypatch):
    requests = list(sessions(14, [0.0, 1.0][seed % 2], seed))
    expected = alone(model, requests)
    tight = {"page_size": 4, "max_total_tokens": 160} if seed % 3 == 0 else {"page_size": 8}
    updated = load_model(folder)  # a model of its own, because its weights are updated
    engine = overlapping(updated, chunked_prefill_size=[-1, 16, 50][seed % 3], **tight)
    engine.speculation.planner.budget = EXPENSIVE if seed % 2 else engine.speculation.planner.budget
    control = Control(engine, folder)
    control.folder = folder
    if asynchronous:  # tokens are sampled twice, see below
        monkeypatch.setattr(sampler, "_ORDERED", 2)
        engine.launcher.sampler.alongside, engine.launcher.sampler.resamples = False, True
    found = Traffic(engine, control, requests, seed).run()
    assert found == {i: expected[i] for i in found}
    assert len(found) > 7
    assert engine.behind > 10


@pytest.mark.parametrize("kind", ["right", "mixed", "late"])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_with_prepared_steps(folder, model, seed, kind, monkeypatch):
    requests = list(sessions(14, [0.0, 1.0][seed % 2], seed))
    expected = alone(model, requests)
    tight = {"page_size": 4, "max_total_tokens": 240} if seed % 3 == 0 else {"page_size": 8}
    engine = preparing_engine(load_model(folder), chunked_prefill_size=[-1, 16, 50][seed % 3], **tight)
    control = Control(engine, folder)
    control.folder = folder
    if seed == 1:  # tokens are sampled twice
        monkeypatch.setattr(sampler, "_ORDERED", 8)
    found = Traffic(engine, control, requests, seed, Drafts(kind, requests, expected)).run()
    assert found == {i: expected[i] for i in found}
    assert len(found) > 7
    assert engine.prepared > 2


def test_aborted_requests_get_the_tokens_of_the_step_in_flight(model):
    engine = overlapping(model)
    for request in sessions(4, max_tokens=50, stops=0):
        engine.open(request)
    before = []
    for _ in range(6):
        before += engine.step().commits
    assert engine.in_flight
    assert engine.abort() == 4
    commits = engine.step().commits
    assert [commit.finish_reason for commit in commits] == [FinishReason.RUNNING] * 4 + [FinishReason.ABORT] * 4
    for one in range(1, 5):
        path = [commit for commit in before + commits if commit.session_id == one]
        assert [c.base_length for c in path[1:]] == [c.base_length + len(c.tokens) for c in path[:-1]]
    assert engine.idle
    engine.check()


# --- what must be known before the next step ---


def test_no_overlap_for_sessions_that_need_more_than_tokens(model):
    """Penalties, grammars and log-probabilities among other sessions: texts equal those without overlap."""
    grammar = Grammar(GrammarKind.REGEX, "([a-d]{2,5}-)*[xyz]{1,3}!")
    options = [
        {}, {"params": SamplingParams(1.0, seed=2, frequency_penalty=0.7)}, {"grammar": grammar}, {"logprobs": 2},
        {"prompt_logprobs": 1},
    ]  # fmt: skip
    requests = [opening(i, [7 + i] * 9, **({"params": SamplingParams(1.0, seed=i)} | w)) for i, w in enumerate(options)]
    engines = engine_of(model), overlapping(model)
    for engine in engines:
        engine.sessions.grammars.request(99, grammar)
        engine.sessions.grammars.wait(10)
        engine.sessions.grammars.forget(99)
    expected, found = (run(engine, requests) for engine in engines)
    assert found.new == expected.new
    for i in (3, 4):
        for commit, other in zip(found.commits[i], expected.commits[i], strict=True):
            for field in ("logprobs", "prompt_logprobs"):
                assert (getattr(commit, field) is None) == (getattr(other, field) is None)
                if getattr(commit, field) is not None:
                    np.testing.assert_allclose(getattr(commit, field).values, getattr(other, field).values, atol=1e-4)
    assert len(found.new[2]) < 24  # the others continue
    assert engines[1].behind == 0


@pytest.mark.parametrize("pays", [True, False])
def test_no_overlap_where_proposals_pay(model, pays):
    requests = list(sessions(5, max_tokens=30, stops=0))
    expected = alone(model, requests)
    text = {r.session_id: r.tokens.tolist() + expected[r.session_id] for r in requests}
    engine = overlapping(model)
    engine.speculation.planner.budget = engine.speculation.planner.budget if pays else EXPENSIVE
    found = run(engine, requests, lambda i, path: [chain(i, path, text[i][len(path) : len(path) + 3])])
    assert found.new == expected
    assert (engine.behind == 0) == pays
    assert (found.accepted > 50) == pays


def test_tokens_that_are_sampled_again_invalidate_the_following_step(model, monkeypatch):
    """Asynchronous sampling may find, after a token became a root, that it needs more of the vocabulary."""
    monkeypatch.setattr(sampler, "_ORDERED", 2)
    requests = [opening(i, [5 + i] * 4, SamplingParams(1.5, seed=i, top_p=0.95), max_tokens=20) for i in range(5)]
    expected = alone(model, requests)
    engine = overlapping(model)
    engine.launcher.sampler.alongside, engine.launcher.sampler.resamples = False, True
    spoiled = spoiled_roots(monkeypatch)
    assert run(engine, requests).new == expected
    assert sum(spoiled) > 5
    assert engine.behind > 10


def test_broken_logits_end_one_session_while_the_next_step_runs(tmp_path):
    model = load_model(write_model(tmp_path, tie_word_embeddings=False))
    healthy = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=12)]).new[1]
    table = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(0))
    table[300] = float("nan")
    model.runner.update({"model.embed_tokens.weight": table})
    engine = overlapping(model, page_size=1)
    expected = run(engine_of(model), [opening(1, [5, 6, 7], max_tokens=12)]).new[1]
    assert healthy != expected
    engine.open(opening(1, [5, 6, 7], max_tokens=12))
    engine.open(opening(2, [5, 300, 7]))
    text, failures = [], []
    while not engine.idle:
        output = engine.step()
        text += [token for commit in output.commits for token in commit.tokens.tolist()]
        failures += [failure.session_id for failure in output.failures]
        engine.check()
    assert text == expected
    assert failures == [2]
    assert engine.behind > 5
    table[300] = 0.0
    model.runner.update({"model.embed_tokens.weight": table})
    again = opening(3, [5, 300, 7, 8], max_tokens=12)  # finds no cached keys of the failed session
    assert run(engine, [again]).new == run(engine_of(model), [again]).new


# --- ids that only the device knows ---


@pytest.mark.parametrize("captured", [False, True])
def test_deferred_roots_are_written_on_the_device(tmp_path, captured):
    inner = modules(write_model(tmp_path))
    works = random_works(np.random.default_rng(3), 4, 5)
    batch = build(works, CPU)
    rows = np.array([0, len(batch) - 1])
    tokens = torch.tensor([9, -1, 8, int(batch.rows.ids[0]), int(batch.rows.ids[-1])])
    blank = batch.rows.ids.copy()
    blank[rows] = 0
    late = replace(batch, rows=replace(batch.rows, ids=blank), roots=DeferredRoots(rows, np.array([3, 4]), tokens))
    with torch.inference_mode():
        cache = history(works)
        runner = inner
        if captured:
            runner = GraphRunner(inner, [len(batch) + 3], direct)
            runner.capture(cache, CPU)
        expected = inner.forward(batch, history(works)).logits
        torch.testing.assert_close(runner.forward(late, cache).logits, expected, atol=1e-5, rtol=1e-4)
        ids = torch.zeros(2, dtype=torch.int64)
        DeferredRoots(np.array([0, 1]), np.array([1, 2]), tokens).put(ids)
    assert ids.tolist() == [0, 8]  # 0 where no token could be sampled


# --- the loop, the flag ---


def test_the_loop_serves_an_engine_whose_steps_overlap(model):
    requests = list(sessions(6))
    expected = alone(model, requests)
    engine = overlapping(model)
    warm_up(engine)
    assert engine.overlap
    assert engine.idle
    text, ended, done, faults = {i: [] for i in expected}, [], threading.Event(), []

    def publish(output):
        for commit in output.commits:
            text[commit.session_id] += commit.tokens.tolist()
            assert output.load.step_microseconds > 0
            if commit.finish_reason != FinishReason.RUNNING:
                ended.append(commit.session_id)
        if len(ended) == len(requests):
            done.set()

    loop = EngineLoop(faults.append)
    loop.start(engine, publish)
    for request in requests:
        loop.submit(Message(opens=[request]))
    assert done.wait(20)
    assert loop.call(lambda: engine.idle).result(10)
    loop.stop()
    assert faults == []
    assert text == expected


def test_overlap_is_for_cuda_only(model):
    assert not engine_of(model, disable_overlap_schedule=True).overlap
    assert not engine_of(model).overlap
