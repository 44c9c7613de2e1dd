"""Which sessions are admitted next: by caller, cached prefix and priority, and which are refused."""

from itertools import islice

import pytest

from outrider.errors import Overloaded
from outrider.serving.waiting import MAX_PASSED_OVER, MAX_PREFERRED, WaitingQueue
from tests.support.outrider.scheduling import advance, scheduler, session, spans


def running(s):
    """Ids of the running sessions, in the order of admission."""
    return [one.id for one in islice(s, s.running)]


def run_to_the_end(s):
    """Ids in the order of admission, if each session ends after one step."""
    order = []
    while len(s):
        s.plan()
        for one in list(islice(s, s.running)):
            order.append(one.id)
            s.remove(one)
    return order


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_callers_take_turns_at_admission(policy):
    s = scheduler(pages=1000, step=100, max_running=1, policy=policy)
    for i in range(20):
        s.add(session(s, i, 5, caller="greedy"))
    for i in (100, 101):
        s.add(session(s, i, 5, caller="modest"))
    s.add(session(s, 200, 5, caller="third"))
    assert run_to_the_end(s)[:6] == [0, 100, 200, 1, 101, 2]


def test_the_caller_with_the_fewest_running_sessions_is_admitted():
    s = scheduler(pages=1000, step=100, max_running=4)
    for i in range(8):
        s.add(session(s, i, 5, caller="greedy"))
    s.plan()
    for i in range(100, 103):
        s.add(session(s, i, 5, caller="modest"))
    for end, admitted in ((0, 100), (1, 101), (2, 4)):
        s.remove(next(one for one in s if one.id == end))
        s.plan()
        assert running(s)[-1] == admitted


def test_a_caller_without_a_running_session_takes_the_place_of_the_greediest():
    s = scheduler(pages=40, page_size=4, max_running=4)
    for i in range(6):
        s.add(session(s, i, 5, caller="greedy"))
    advance(s, s.plan())
    for i in (100, 101):
        s.add(session(s, i, 5, caller="modest"))
    assert not s.fits()  # a step that is in flight would lose a session
    advance(s, s.plan())
    assert (running(s), s.preemptions) == ([0, 1, 2, 100], 1)
    assert s.fits()
    s.remove(next(one for one in s if one.id == 100))
    advance(s, s.plan())
    assert (running(s), s.preemptions) == ([0, 1, 2, 101], 1)
    s.remove(next(one for one in s if one.id == 101))
    s.plan()
    assert running(s) == [0, 1, 2, 3], "the one that was preempted goes on"
    s.check()


@pytest.mark.parametrize(("length", "admitted"), [(30, True), (90, False)])
def test_a_caller_displaces_others_for_its_share_of_the_pages_alone(length, admitted):
    s = scheduler(pages=32, page_size=4, max_running=9, step=200)
    for i in range(4):
        s.add(session(s, i, 30, caller="greedy"))
    advance(s, s.plan())
    s.add(session(s, 100, length, caller="modest"))
    advance(s, s.plan())
    assert (100 in running(s)) == admitted
    assert s.preemptions == (1 if admitted else 0)
    s.check()


def test_a_caller_s_priorities_do_not_starve_another():
    s = scheduler(pages=1000, step=100, max_running=1)
    for i in range(30):
        s.add(session(s, i, 5, caller="greedy", priority=-(2**31)))
    s.add(session(s, 100, 5, caller="modest"))
    assert run_to_the_end(s).index(100) == MAX_PREFERRED + 1


def test_a_caller_with_more_sessions_is_preempted_first():
    s = scheduler(pages=6, page_size=4)
    for i in (1, 2):
        s.add(session(s, i, 7, caller="greedy"))
    s.add(session(s, 3, 7, caller="modest"))
    for _ in range(3):
        advance(s, s.plan())
    assert (s.preemptions, running(s)) == (1, [1, 3])
    s.check()


def test_the_longest_match_is_next_but_no_session_starves():
    s = scheduler(pages=1000, step=100, max_running=1, policy="lpm")
    s.add(session(s, 0, 9, shared=9))
    advance(s, s.plan())
    stranger = session(s, 1, 9)
    s.add(stranger)
    order = []
    for i in range(2, MAX_PASSED_OVER + 4):
        s.add(session(s, i, 12, shared=9))
        s.remove(next(iter(s)))
        advance(s, s.plan())
        order.append(next(iter(s)).id)
    assert order[:MAX_PASSED_OVER] == list(range(2, MAX_PASSED_OVER + 2))
    assert order[MAX_PASSED_OVER] == 1


def test_preempted_sessions_do_not_count_as_passing_over():
    queue = WaitingQueue("lpm")
    s = scheduler(pages=1000, step=100, max_running=1)
    s.add(session(s, 0, 9, shared=9))
    advance(s, s.plan())
    s.remove(next(iter(s)))
    stranger, known = session(s, 1, 9), session(s, 2, 12, shared=9)
    queue.add(stranger)
    queue.add(known)
    back = session(s, 3, 9)
    for _ in range(MAX_PASSED_OVER):
        queue.requeue(back)
        queue.take(queue.next())
    assert list(queue) == [stranger, known]
    assert queue.next() is known


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_lower_numbers_of_priority_go_first_and_equal_ones_in_order(policy):
    s = scheduler(pages=1000, step=100, max_running=1, policy=policy)
    for i, priority in enumerate([0, 0, 5, -1, 5, 0]):
        s.add(session(s, i, 5, priority=priority))
    order = []
    while len(s):
        s.plan()
        order.append(next(iter(s)).id)
        s.remove(next(iter(s)))
    assert order == [3, 0, 1, 5, 2, 4]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_stream_of_preferred_sessions_starves_no_other(policy):
    s = scheduler(pages=1000, step=100, max_running=1, policy=policy)
    low = range(1000, 1003)
    for i in low:
        s.add(session(s, i, 5, priority=7))
    order = []
    for i in range(40):  # one more arrives whenever one is admitted
        s.add(session(s, i, 5, priority=-(2**31)))
        s.plan()
        order.append(next(iter(s)).id)
        s.remove(next(iter(s)))
    assert [order.index(i) for i in low] == [MAX_PREFERRED, 2 * MAX_PREFERRED + 1, 3 * MAX_PREFERRED + 2]
    assert [i for i in order if i not in low] == list(range(37))


def test_first_come_first_served_ignores_matches():
    s = scheduler(pages=1000, step=100, max_running=1)
    s.add(session(s, 0, 9, shared=9))
    advance(s, s.plan())
    s.add(session(s, 1, 9))
    s.add(session(s, 2, 12, shared=9))
    s.remove(next(iter(s)))
    assert spans(s.plan()) == [(1, 0, 9)]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_full_queue_refuses_new_sessions_and_no_others(policy):
    s = scheduler(pages=100, max_running=2, max_queued=1, policy=policy)
    for i in range(3):
        s.add(session(s, i, 5))
    with pytest.raises(Overloaded, match="1 requests wait"):
        s.add(session(s, 3, 5))
    s.add(session(s, 4, 5, committed=[9]))  # it comes from another replica
    assert (s.running, s.waiting) == (2, 2)
    s.remove(next(iter(s)))
    s.plan()
    s.remove(next(iter(s)))
    s.add(session(s, 5, 5))
    assert (s.running, s.waiting) == (2, 1)


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_a_session_from_elsewhere_goes_before_new_prompts(policy):
    """A session that is opened again for its drafter was in the middle of its answer."""
    s = scheduler(pages=100, max_running=2, policy=policy)
    for i in range(6):
        s.add(session(s, i, 5))
    advance(s, s.plan())
    for one in list(s)[:2]:
        s.remove(one)
        s.add(session(s, one.id, 5, committed=[9]))
    assert [c.session.id for c in s.plan()] == [0, 1]
    s.check()


def test_without_a_queue_a_session_runs_at_once_or_not_at_all():
    s = scheduler(pages=100, max_running=1, max_queued=0)
    s.add(session(s, 1, 5))
    with pytest.raises(Overloaded):
        s.add(session(s, 2, 5))
    assert [one.id for one in s] == [1]
