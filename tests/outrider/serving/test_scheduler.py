"""The scheduler: the sessions and tokens of a step, with pools small enough to check by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import EngineFault
from outrider.serving.messages import OpenSession
from outrider.serving.session import Session
from outrider.speculation.sampling import SamplingParams, StopConditions
from tests.support.outrider.scheduling import advance, scheduler, session, spans


def test_prompts_are_computed_in_chunks_and_decoding_comes_first():
    s = scheduler(pages=100, step=10)
    s.add(session(s, 1, 12))
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 0, 10, False)]
    advance(s, plan)
    s.add(session(s, 2, 20))
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 10, 12, True), (2, 0, 8, False)]
    advance(s, plan)
    plan = s.plan()
    assert [(c.session.id, c.start, c.stop, c.last) for c in plan] == [(1, 12, 13, True), (2, 8, 17, False)]


def test_few_tokens_of_a_prompt_are_scored_while_others_decode():
    s = scheduler(pages=100, step=40, scored_tokens=16)
    s.add(session(s, 1, 40, prompt_logprobs=1))
    assert spans(s.plan()) == [(1, 0, 16)]
    s.add(session(s, 2, 3))
    advance(s, s.plan())  # with the last token of its prompt, the second session decodes
    assert spans(s.plan()) == [(2, 3, 4), (1, 16, 20)]


def test_admission_slots_are_limited_and_first_come_first_served():
    s = scheduler(pages=100, max_running=2)
    for i in range(4):
        s.add(session(s, i, 2))
    assert [c.session.id for c in s.plan()] == [0, 1]
    assert (s.running, s.waiting) == (2, 2)
    s.remove(next(iter(s)))
    assert [c.session.id for c in s.plan()] == [1, 2]


def test_the_last_arrival_is_preempted_when_pages_run_out():
    s = scheduler(pages=4, page_size=4)
    first, second = session(s, 1, 7), session(s, 2, 7)
    s.add(first)
    s.add(second)
    for _ in range(2):
        advance(s, s.plan())
    assert s.running == 2
    advance(s, s.plan())  # both want a third page of four
    assert (s.running, s.preemptions) == (1, 1)
    assert second.computed == 0
    assert second.length == 9
    s.check()
    s.remove(first)
    advance(s, s.plan())
    assert second.length == 10


def test_a_session_larger_than_the_pool_is_a_fault():
    s = scheduler(pages=2, page_size=4)
    s.add(session(s, 1, 9))
    with pytest.raises(EngineFault, match="whole page pool"):
        s.plan()


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20), st.sampled_from("aab")), min_size=1, max_size=8),
    st.integers(6, 12), st.one_of(st.none(), st.integers(3, 8)), st.sampled_from(["fcfs", "lpm"]), st.booleans(),
)  # fmt: skip
def test_every_session_ends_whatever_the_pool(shapes, pages, step, policy, enabled):
    s = scheduler(pages=pages, page_size=4, max_running=3, step=step, policy=policy)
    s.prefix.enabled = enabled
    sessions = [session(s, i, n, shared=min(n, shared), caller=caller) for i, (n, shared, caller) in enumerate(shapes)]
    for one in sessions:
        s.add(one)
    for _ in range(3000):
        if not len(s):
            break
        advance(s, s.plan())
        s.check()
        for one in list(s):
            if one.new_tokens >= 3:
                s.remove(one)
    assert len(s) == 0
    assert all(one.new_tokens == 3 for one in sessions)
    s.prefix.flush()
    s.allocator.check(expected_leased=0)
    assert s.allocator.free_pages == pages


# --- shared pages ---


def test_several_choices_compute_their_prompt_once():
    s = scheduler(pages=100, step=100)
    for i in range(4):
        s.add(session(s, i, 18, shared=18))
    plan = s.plan()
    assert spans(plan) == [(0, 0, 18)]
    advance(s, plan)
    plan = s.plan()
    assert spans(plan) == [(0, 18, 19), (1, 16, 18), (2, 16, 18), (3, 16, 18)]
    advance(s, plan)
    assert [one.record.cached_tokens for one in s] == [0, 16, 16, 16]
    assert s.allocator.leased_pages == 4 + 4
    s.check()


def test_a_prompt_shares_the_chunks_of_another_up_to_their_difference():
    s = scheduler(pages=100, step=10)
    s.add(session(s, 1, 40, shared=25))
    s.add(session(s, 2, 30, shared=25))
    plans = []
    for _ in range(6):
        plans.append(spans(s.plan()))
        advance(s, s.plan())
    assert plans[:2] == [[(1, 0, 10)], [(1, 10, 20)]]  # the second one holds back
    assert [one.record.cached_tokens for one in s] == [0, 24]
    assert sum(stop - start for plan in plans for name, start, stop in plan if name == 2 and stop <= 30) == 30 - 24
    s.check()


def test_no_session_waits_for_one_that_was_removed():
    s = scheduler(pages=100, step=10)
    first, second = session(s, 1, 40, shared=40), session(s, 2, 40, shared=40)
    s.add(first)
    s.add(second)
    advance(s, s.plan())
    s.remove(first)
    assert spans(s.plan()) == [(2, 8, 18)]  # what the first one had published is kept


def test_the_next_turn_finds_the_prompt_and_the_answer():
    s = scheduler(pages=100, step=100)
    first = session(s, 1, 10)
    s.add(first)
    for _ in range(7):
        advance(s, s.plan())
    assert first.length == 17
    s.remove(first)
    request = OpenSession(2, np.append(first.tokens, [8, 8, 8]).astype(np.uint32), 20, SamplingParams(),
                          StopConditions(9))  # fmt: skip
    second = Session(request, s.prefix)
    s.add(second)
    assert spans(s.plan()) == [(2, 16, 20)]
    assert second.record.cached_tokens == 16


def test_a_prompt_that_is_all_cached_still_computes_its_last_token():
    s = scheduler(pages=100, step=100)
    for i in (1, 2):
        s.add(session(s, i, 16, shared=16))
        advance(s, s.plan())
    assert [one.record.cached_tokens for one in s] == [0, 12]


def test_readmission_after_preemption_uses_the_cache():
    s = scheduler(pages=9, page_size=4, step=100)
    first, second = session(s, 1, 13), session(s, 2, 13)
    s.add(first)
    s.add(second)
    while not s.preemptions:
        advance(s, s.plan())
        s.check()
    assert (second.computed, s.waiting) == (0, 1)
    s.remove(first)
    (chunk,) = s.plan()
    assert chunk.session is second
    assert 12 <= chunk.start < second.length
    assert second.record.cached_tokens == 0  # its own work is no saving
    s.check()


def test_cached_pages_are_evicted_before_sessions_are_preempted():
    s = scheduler(pages=8, page_size=4, step=100)
    old = session(s, 1, 15)
    s.add(old)
    advance(s, s.plan())
    s.remove(old)
    assert s.allocator.cached_pages == 3
    s.add(session(s, 2, 15))
    s.add(session(s, 3, 11))
    assert len(s.plan()) == 2
    assert (s.preemptions, s.allocator.cached_pages, s.allocator.leased_pages) == (0, 1, 7)
    s.check()


def test_admission_counts_shared_pages_once():
    s = scheduler(pages=6, page_size=4, step=100)
    s.add(session(s, 1, 16, shared=16))
    advance(s, s.plan())  # holds 4 pages and will hold a fifth
    s.add(session(s, 2, 16, shared=16))  # needs 2 more, of which there is but one
    advance(s, s.plan())
    assert (s.running, s.waiting) == (1, 1)
    s.add(session(s, 3, 3))
    s.remove(next(iter(s)))
    s.plan()
    assert s.running == 2


def test_pages_for_pending_tokens_are_not_given_to_new_sessions():
    s = scheduler(pages=8, page_size=4, step=4)
    s.add(session(s, 1, 24))  # needs 7 pages in time, and has 1 after a step
    advance(s, s.plan())
    s.add(session(s, 2, 8))
    for _ in range(6):
        advance(s, s.plan())
    assert (s.preemptions, s.waiting) == (0, 1)


# --- fairness ---


def test_a_short_prompt_overtakes_a_long_one_without_stopping_it():
    s = scheduler(pages=100, step=20)
    s.add(session(s, 1, 100))
    advance(s, s.plan())
    s.add(session(s, 2, 30))
    s.add(session(s, 3, 6))
    assert spans(s.plan()) == [(1, 20, 30), (3, 0, 6), (2, 0, 4)]


def test_a_stream_of_short_prompts_does_not_starve_a_long_one():
    s = scheduler(pages=1000, step=16, max_running=6)
    long = session(s, 0, 200)
    s.add(long)
    steps = 0
    while long.pending > 1:
        steps += 1
        for one in [one for one in s if one.new_tokens >= 1]:
            s.remove(one)
        while len(s) < 6:
            s.add(session(s, 100 * steps + len(s), 12))
        advance(s, s.plan())
    assert steps <= 200 / 8 + 1


def test_decoding_sessions_take_part_in_every_step():
    s = scheduler(pages=1000, step=8)
    decoding = session(s, 1, 2)
    s.add(decoding)
    advance(s, s.plan())
    s.add(session(s, 2, 300))
    for _ in range(20):
        length = decoding.length
        plan = s.plan()
        assert sum(len(chunk) for chunk in plan) <= 8
        advance(s, plan)
        assert decoding.length == length + 1


@pytest.mark.parametrize(("prefill", "sizes"), [(None, [40, 30, 6]), (40, [40]), (35, [40]), (50, [40, 6])])
def test_without_chunks_prompts_are_computed_whole(prefill, sizes):
    s = scheduler(pages=100, step=None, prefill_tokens=prefill)
    for i, length in enumerate((40, 30, 6)):
        s.add(session(s, i, length))
    assert sorted((len(chunk) for chunk in s.plan()), reverse=True) == sizes
    for _ in range(3):
        advance(s, s.plan())
    assert all(one.pending == 1 for one in s)


def test_prompts_have_a_limit_of_their_own_in_a_step():
    s = scheduler(pages=100, step=64, prefill_tokens=10)
    s.add(session(s, 1, 40))
    assert spans(s.plan()) == [(1, 0, 10)]


def test_callers_share_the_tokens_for_prompts_evenly():
    s = scheduler(pages=1000, step=30, max_running=20)
    for i in range(8):
        s.add(session(s, i, 40, caller="greedy"))
    s.add(session(s, 8, 100, caller="modest"))
    s.add(session(s, 9, 4, caller="short"))
    plan = s.plan()
    assert spans(plan)[:2] == [(9, 0, 4), (8, 0, 13)]  # what the short prompt leaves is shared by the others
    assert sum(len(chunk) for chunk in plan) == 30
    assert all(chunk.session.caller == "greedy" for chunk in plan[2:])
    advance(s, plan)
    assert (8, 13, 28) in spans(s.plan())  # one of 30 tokens decodes


def test_callers_share_the_tokens_with_log_probabilities_evenly():
    s = scheduler(pages=1000, step=100, scored_tokens=16)
    for i, caller in enumerate(["greedy", "greedy", "modest"]):
        s.add(session(s, i, 40, caller=caller, prompt_logprobs=1))
    assert spans(s.plan()) == [(2, 0, 8), (0, 0, 8)]


# --- the queue ---


def test_flushed_pages_are_not_found_and_running_sessions_go_on():
    s = scheduler(pages=100, step=100)
    s.add(session(s, 1, 20, shared=20))
    advance(s, s.plan())
    s.prefix.flush()
    s.add(session(s, 2, 20, shared=20))
    advance(s, s.plan())
    assert [(one.length, one.record.cached_tokens) for one in s] == [(22, 0), (21, 0)]
    s.check()


def test_retracted_sessions_are_not_preemptions():
    s = scheduler()
    s.add(session(s, 1, 7))
    advance(s, s.plan())
    assert s.retract() == 1
    assert (s.running, s.waiting, s.preemptions) == (0, 1, 0)
