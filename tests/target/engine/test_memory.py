"""Pages of the target: sharing, eviction, preemption and cancellation leave each text unchanged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.config import TargetConfig
from outrider.errors import ConfigError, Overloaded
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams
from services.target.engine.engine import TargetEngine
from services.target.engine.limits import scheduling
from tests.support.target.driving import GREEDY, chain, engine_of, load_modules, opening, random_tree, run
from tests.support.tiny import VOCAB, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_modules(
        write_model(tmp_path_factory.mktemp("llama"))
    )  # its cache writes go through Python, where a test observes them


@pytest.fixture(scope="module")
def texts(model):
    """Prompts with shared beginnings in groups, their sampling parameters, and the text of each one alone."""
    rng = np.random.default_rng(5)
    heads = [rng.integers(3, VOCAB, length).tolist() for length in (0, 20, 37)]
    prompts = [heads[i % 3] + rng.integers(3, VOCAB, rng.integers(1, 25)).tolist() for i in range(12)]
    prompts += prompts[:4]  # some prompts repeat
    params = [GREEDY if i % 2 else SamplingParams(0.9, seed=i) for i in range(len(prompts))]
    new = [
        run(engine_of(model, disable_radix_cache=True), [opening(i, prompt, one)]).new[i]
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    return prompts, params, new


class WriteChecker:
    """Checks that no key is written into a shared page."""

    def __init__(self, engine: TargetEngine) -> None:
        self.writes = 0
        self._pages, self._size = engine.scheduler.prefix.pages, engine.scheduler.allocator.page_size
        self._write, self._move = engine.cache.write, engine.cache.move
        engine.cache.write, engine.cache.move = self.write, self.move

    def check(self, slots):
        self.writes += len(slots)
        assert self._pages.isdisjoint((slots // self._size).tolist()), "a shared page was written"

    def write(self, layer, slots, keys, values):
        self.check(slots)
        self._write(layer, slots, keys, values)

    def move(self, sources, destinations):
        self.check(destinations)
        self._move(sources, destinations)


LIFE = st.tuples(st.integers(0, 15), st.integers(0, 12), st.one_of(st.none(), st.integers(1, 20)))
LIVES = st.lists(LIFE, min_size=1, max_size=10, unique_by=lambda life: life[0])


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=LIVES, page_size=st.sampled_from([1, 16, 64]), spare=st.integers(0, 40), chunk=st.sampled_from([-1, 5, 64]),
    policy=st.sampled_from(["fcfs", "lpm"]), drafted=st.booleans(), seed=st.integers(0, 2**16),
)  # fmt: skip
def test_random_sessions_in_a_tiny_pool(model, texts, lives, page_size, spare, chunk, policy, drafted, seed):
    """lives: index of the text, step of its arrival, and steps until its client disconnects, if it does."""
    prompts, params, new = texts
    longest = max(len(prompt) for prompt in prompts) + 24
    tokens = -(-(longest + spare) // page_size) * page_size
    flags = {"page_size": page_size, "max_total_tokens": tokens, "chunked_prefill_size": chunk}
    engine = engine_of(model, **flags, schedule_policy=policy, max_running_requests=4)
    checker = WriteChecker(engine)
    rng = np.random.default_rng(seed)
    paths: dict[int, list[int]] = {}
    arrivals = {i: (step, None if stay is None else step + stay) for i, step, stay in lives}
    step = 0
    while arrivals or not engine.idle:
        for i, (start, end) in list(arrivals.items()):
            if start == step:
                paths[i] = list(prompts[i])
                engine.open(opening(i, prompts[i], params[i]))
            if step == end:
                engine.close(i)
            if step == (start if end is None else end):
                del arrivals[i]
        if drafted:
            for i, path in paths.items():
                ahead = [*prompts[i], *new[i]][len(path) :][: int(rng.integers(0, 8))]
                engine.receive([random_tree(rng, i, path, VOCAB, 5), chain(i, path, ahead)], ())
        output = engine.step()
        assert not output.failures
        for commit in output.commits:
            assert commit.base_length == len(paths[commit.session_id])
            paths[commit.session_id] += commit.tokens.tolist()
        engine.check()
        step += 1
        assert step < 2000
    for i, _, stay in lives:
        whole = [*prompts[i], *new[i]]
        assert paths[i] == whole[: len(paths[i])]
        assert stay is not None or paths[i] == whole
    assert checker.writes
    engine.scheduler.allocator.check(expected_leased=0)
    assert engine.load().free_pages == engine.load().total_pages


@pytest.mark.parametrize("page_size", [1, 16])
def test_earlier_turns_of_a_conversation_are_cached(model, texts, page_size):
    """A conversation, each turn of which sends all of it, with the answers."""
    engine = engine_of(model, page_size=page_size)
    rng = np.random.default_rng(0)
    conversation = rng.integers(3, VOCAB, 40).tolist()
    for turn in range(4):
        expected = run(engine_of(model, disable_radix_cache=True), [opening(turn, conversation)]).new[turn]
        engine.open(opening(turn, conversation))
        computed, answer, cached = 0, [], 0
        while not engine.idle:
            output = engine.step()
            if not answer:
                computed += output.load.step_tokens
            for commit in output.commits:
                answer += commit.tokens.tolist()
                cached += commit.cached_tokens
        assert answer == expected
        assert computed == len(conversation) - cached
        # All tokens but the last of an answer have keys; only full pages are cached.
        before = 0 if not turn else (len(conversation) - 6 - 1) // page_size * page_size
        assert cached == before
        conversation += [*answer, *rng.integers(3, VOCAB, 6).tolist()]


def test_sessions_of_other_salts_share_no_pages(model):
    engine = engine_of(model)
    text = list(range(3, 60))
    cached = []
    for i, salt in enumerate(["", "a", "a", ""]):
        engine.open(replace(opening(i, text), cache_salt=salt))
        cached.append(engine.step().commits[0].cached_tokens)
        engine.close(i)
    assert cached == [0, 0, 48, 48]


def test_keys_of_a_failed_session_are_not_shared(tmp_path):
    model = load_modules(write_model(tmp_path, tie_word_embeddings=False))
    weight = model.runner.module.model.embed_tokens.weight
    engine = engine_of(model, page_size=4, chunked_prefill_size=8, max_running_requests=1)
    whole = weight[300].clone()
    weight[300] = float("nan")
    engine.open(opening(1, [5, 6, 7, 8, 300, 7, 7, 7, 7]))
    assert not engine.step().failures  # the first chunk has finite logits, and its pages are cached
    assert engine.step().failures
    assert len(engine.scheduler.prefix) == 0
    engine.check()
    weight[300] = whole
    assert (
        run(engine, [opening(2, [5, 6, 7, 8, 300, 7, 7, 7, 7])]).new
        == run(engine_of(model), [opening(2, [5, 6, 7, 8, 300, 7, 7, 7, 7])]).new
    )


def test_sessions_of_one_prompt_share_its_pages(model):
    engine = engine_of(model)
    text = list(range(3, 90))
    for i in range(4):
        engine.open(opening(i, text, SamplingParams(1.0, seed=i)))
    first, second = engine.step(), engine.step()
    assert first.load.step_tokens == len(text)
    assert [commit.cached_tokens for commit in first.commits + second.commits] == [0, 0, 80, 80, 80]
    pages = engine.load().total_pages - engine.load().free_pages
    assert pages == 5 + 4


def test_a_long_prompt_delays_others_by_one_chunk_only(model):
    engine = engine_of(model, chunked_prefill_size=16, max_running_requests=4)
    engine.open(opening(1, [5, 6, 7], max_tokens=40))
    engine.step()
    engine.open(opening(2, list(np.arange(300) % 200 + 3)))
    engine.open(opening(3, [9, 8, 7]))
    seen = {1: 0, 2: 0, 3: 0}
    for step in range(1, 25):
        output = engine.step()
        assert output.load.step_tokens <= 16
        for commit in output.commits:
            seen[commit.session_id] += 1
        assert seen[1] == step
        assert seen[3] == step
    assert seen[2] > 0


def test_a_full_queue_refuses_sessions(model):
    engine = engine_of(model, max_running_requests=1, max_queued_requests=1)
    for i in (1, 2):
        engine.open(opening(i, [5, 6, 7]))
    with pytest.raises(Overloaded):
        engine.open(opening(3, [5, 6, 7]))
    engine.open(opening(4, [5, 6, 7], committed=[9]))
    ended = {commit.session_id for _ in range(80) for commit in engine.step().commits if commit.finish_reason}
    assert ended == {1, 2, 4}
    assert engine.idle
    engine.check()


def test_roots_of_unused_salts_are_dropped(model):
    engine = engine_of(model, page_size=8, max_total_tokens=64)
    for i in range(20):
        result = run(engine, [replace(opening(i, list(range(3, 30)), max_tokens=2), cache_salt=str(i))])
        assert result.reasons[i] == FinishReason.LENGTH
    assert len(engine.scheduler.prefix.namespaces) <= 3


@pytest.mark.parametrize("flags", [
    {"chunked_prefill_size": 0}, {"chunked_prefill_size": -2}, {"max_prefill_tokens": 0}, {"max_queued_requests": -1},
    {"max_total_tokens": 0},
])  # fmt: skip
def test_invalid_limits_are_refused_by_name(flags):
    with pytest.raises(ConfigError, match=next(iter(flags)).replace("_", "-")):
        TargetConfig(**flags).check()


def test_a_chunk_is_short_on_a_cpu_and_holds_the_roots_of_all():
    def tokens(device, **flags):
        return scheduling(TargetConfig(**flags), 320, torch.device(device)).step_tokens

    assert (tokens("cpu"), tokens("cuda")) == (128, 2048)
    assert (tokens("cpu", chunked_prefill_size=-1), tokens("cpu", chunked_prefill_size=300)) == (None, 300)
    assert tokens("cpu", chunked_prefill_size=4, max_running_requests=9) == 9


def test_preemptions_are_reported(model, texts):
    prompts, params, _ = texts
    engine = engine_of(model, page_size=4, max_total_tokens=96)
    for i in (1, 2):
        engine.open(opening(i, prompts[i], params[i]))
    preemptions = []
    while not engine.idle:
        preemptions.append(engine.step().load.preemptions)
    assert preemptions == sorted(preemptions)
    assert preemptions[-1] == engine.scheduler.preemptions > 0
