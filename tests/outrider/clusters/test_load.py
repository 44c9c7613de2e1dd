"""Loads of the pools from what gateways answer."""

import pytest

from outrider.clusters.load import Counters, Window, counters_of, draft_load, pool_load
from outrider.clusters.scaling import Load


def worker(service="target", address="a:1", state="ready", sessions=1, waiting=0, most=8):
    return {"service": service, "address": address, "state": state, "sessions": sessions,
            "waiting_sessions": waiting, "max_sessions": most}  # fmt: skip


def sample(name, value, worker, **labels):
    labels |= {"worker": worker} if worker else {}
    inside = ",".join(f'{label}="{text}"' for label, text in labels.items())
    return f"outrider_{name}{{{inside}}} {value}" if labels else f"outrider_{name} {value}"


def page(steps, tokens, accepted, late, lag, proposals, worker=""):
    late_steps, by_source = "steps_without_draft_by_cause_total", "accepted_draft_tokens_by_source_total"
    return "\n".join([
        "# HELP outrider_verification_steps Commits.",
        sample("verification_steps_total", steps, worker),
        sample("generated_tokens_total", tokens, worker),
        sample(by_source, accepted, worker, source="draft"),
        sample(by_source, 999, worker, source="lookup"),
        sample(late_steps, late, worker, address="a:1", cause="late"),
        sample(late_steps, "1e1", worker, address="b:1", cause="late"),
        sample(late_steps, 999, worker, address="a:1", cause="empty"),
        sample("draft_lag_tokens_sum", lag, worker, address="a:1"),
        sample("draft_lag_tokens_count", proposals, worker, address="a:1"),
        sample("draft_lag_tokens_bucket", proposals, worker, address="a:1", le="+Inf"),
    ])  # fmt: skip


def test_sessions_are_those_of_all_gateways_and_queues_those_of_engines():
    one = [worker(sessions=3, waiting=4), worker(address="b:1", sessions=1), worker("draft", "d:1", sessions=9)]
    other = [
        worker(sessions=2, waiting=4),
        worker(address="b:1", state="draining"),
        worker(address="c:1", state="starting"),
    ]
    assert pool_load("target", [one, other]) == Load(2, sessions=6, waiting=4, capacity=16)
    assert pool_load("draft", [one, other]) == Load(1, sessions=9, capacity=8)


def test_a_queue_that_was_reported_before_its_sessions_ended_is_none():
    assert pool_load("target", [[worker(sessions=0, waiting=4)]]).waiting == 0


def test_counters_of_gateways_are_added_and_those_of_targets_are_not():
    pages = [page(100, 250, 90, 20, 30, 50), page(10, 25, 9, 22, 31, 55)]
    assert counters_of(pages) == Counters(steps=110, tokens=275, accepted=99, late=32, lag_tokens=31, proposals=55)


def test_workers_of_a_gateway_are_parts_of_it():
    both = page(100, 250, 90, 20, 30, 50, worker="0") + "\n" + page(10, 25, 9, 22, 31, 55, worker="1")
    assert counters_of([both]).steps == 110
    assert counters_of([both]).late == 32


def test_a_window_forgets_what_is_older():
    window = Window(10)
    found = [window.add(now, Counters(steps=5.0 * now)) for now in range(0, 40, 2)]
    assert [one.steps for one in found[:3]] == [0, 10, 20]
    assert {one.steps for one in found[6:]} == {50.0}


def test_a_counter_that_begins_anew_begins_a_new_window():
    window = Window(10)
    window.add(0, Counters(steps=100))
    assert window.add(1, Counters(steps=3)).steps == 0
    assert window.add(2, Counters(steps=8)).steps == 5


def test_a_draft_pool_is_loaded_by_what_its_proposals_came_to():
    load, targets = Load(1, sessions=2, capacity=8), Load(1, sessions=3, capacity=8)
    lately = Counters(steps=100, tokens=200, accepted=80, late=30, lag_tokens=120, proposals=40)
    found = draft_load(load, targets, lately)
    assert (found.demand, found.late, found.gain) == (3, 0.3, 0.8)
    assert found.lag_steps == pytest.approx(1.5)  # 3 tokens behind, at 2 tokens a step


@pytest.mark.parametrize("lately", [None, Counters(), Counters(steps=19, late=19)])
def test_few_steps_say_nothing(lately):
    found = draft_load(Load(1), Load(1, sessions=1), lately)
    assert (found.late, found.lag_steps, found.gain, found.demand) == (None, None, None, 1)
