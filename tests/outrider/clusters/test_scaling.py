"""How many replicas a load calls for: a table of decisions, and histories that must not swing."""

import pytest

from outrider.clusters.scaling import Bounds, Load, Rules, Trend, decide
from outrider.errors import ConfigError

RULES = Rules(Bounds(1, 4), up_seconds=10, down_seconds=100)
DRAFTS = Rules(Bounds(0, 4), up_seconds=10, down_seconds=100)


def after(rules, count, load, seconds):
    """The number of replicas after a load has lasted."""
    trend = Trend()
    for now in range(seconds + 1):
        wanted, trend = decide(rules, count, load, trend, float(now))
        if wanted != count:
            return wanted
    return count


@pytest.mark.parametrize(
    ("rules", "count", "load", "seconds", "expected"),
    [
        # load between both thresholds: nothing changes
        (RULES, 2, Load(2, sessions=13, capacity=20), 1000, 2),
        # above the upper one: as many as bring it below, once it has lasted
        (RULES, 2, Load(2, sessions=17, capacity=20), 9, 2),
        (RULES, 2, Load(2, sessions=17, capacity=20), 10, 3),
        (RULES, 1, Load(1, sessions=30, capacity=10), 10, 4),
        (RULES, 1, Load(1, sessions=99, capacity=10), 10, 4),
        # a queue calls for one more, also where pages and not slots are short
        (RULES, 2, Load(2, sessions=8, waiting=2, capacity=20), 10, 3),
        (RULES, 2, Load(2, sessions=8, waiting=2, capacity=20), 9, 2),
        (RULES, 4, Load(4, sessions=80, waiting=40, capacity=40), 1000, 4),
        # replicas that start may suffice
        (RULES, 2, Load(1, sessions=10, waiting=5, capacity=10), 1000, 2),
        # below the lower one: one fewer at a time, after longer
        (RULES, 3, Load(3, sessions=9, capacity=30), 99, 3),
        (RULES, 3, Load(3, sessions=9, capacity=30), 100, 2),
        (RULES, 3, Load(3, sessions=10, capacity=30), 1000, 3),
        (RULES, 1, Load(1, capacity=10), 1000, 1),
        (RULES, 3, Load(2, sessions=1, capacity=20), 100, 2),
        # bounds hold at once
        (RULES, 0, Load(0), 0, 1),
        (RULES, 7, Load(7, sessions=70, capacity=70), 0, 4),
        # drafts: late draft tokens and proposals that are a step behind call for one more
        (DRAFTS, 1, Load(1, sessions=1, capacity=48, demand=1, late=0.3, gain=0.5), 10, 2),
        (DRAFTS, 1, Load(1, sessions=1, capacity=48, demand=1, late=0.1, gain=0.5, lag_steps=1.5), 10, 2),
        (DRAFTS, 1, Load(1, sessions=1, capacity=48, demand=1, late=0.1, gain=0.5, lag_steps=0.5), 1000, 1),
        # late ones keep a draft that has few sessions; below half the limit they do not
        (DRAFTS, 2, Load(2, sessions=2, capacity=96, demand=2, late=0.15, gain=0.5), 1000, 2),
        (DRAFTS, 2, Load(2, sessions=2, capacity=96, demand=2, late=0.05, gain=0.5), 100, 1),
        # drafts on time whose tokens are not accepted: more do not help, fewer suffice
        (DRAFTS, 2, Load(2, sessions=90, capacity=96, demand=90, late=0.0, gain=0.01), 100, 1),
        (DRAFTS, 1, Load(1, sessions=90, capacity=96, demand=90, late=0.0, gain=0.01), 100, 0),
        # none is accepted because all are late: more may help
        (DRAFTS, 1, Load(1, sessions=9, capacity=96, demand=9, late=0.9, gain=0.0), 10, 2),
        # an empty pool: one as soon as there is work
        (DRAFTS, 0, Load(0), 1000, 0),
        (DRAFTS, 0, Load(0, demand=1), 10, 1),
        (DRAFTS, 1, Load(1, capacity=48), 100, 0),
        (DRAFTS, 1, Load(1, sessions=1, capacity=48, demand=1), 1000, 1),
        (Rules(Bounds(0, 0)), 0, Load(0, demand=9), 1000, 0),
    ],
)
def test_decisions(rules, count, load, seconds, expected):
    assert after(rules, count, load, seconds) == expected


def test_a_load_that_comes_and_goes_changes_nothing():
    trend = Trend()
    for now in range(1000):
        busy = now % 9 < 8
        load = Load(2, sessions=20 if busy else 12, capacity=20)
        wanted, trend = decide(RULES, 2, load, trend, float(now))
        assert wanted == 2


def test_each_change_waits_anew():
    trend, count, changes = Trend(), 4, []
    for now in range(500):
        wanted, trend = decide(RULES, count, Load(count, sessions=1, capacity=10 * count), trend, float(now))
        if wanted != count:
            changes.append(now)
            count = wanted
    assert (count, changes) == (1, [100, 201, 302])


def test_a_pool_that_has_shrunk_does_not_grow_again():
    """The same sessions on the replicas that are left are below the upper threshold."""
    for count in range(2, 5):
        for sessions in range(10 * count):
            if after(RULES, count, Load(count, sessions=sessions, capacity=10 * count), 100) < count:
                fewer = Load(count - 1, sessions=sessions, capacity=10 * (count - 1))
                assert after(RULES, count - 1, fewer, 50) == count - 1


@pytest.mark.parametrize(("text", "bounds"), [("2", (2, 2)), ("1:4", (1, 4)), ("0:0", (0, 0)), ("0", (0, 0))])
def test_bounds_are_read(text, bounds):
    found = Bounds.parse("--draft-replicas", text, 0)
    assert (found.low, found.high) == bounds


@pytest.mark.parametrize(
    ("text", "reason"), [("", "is no number"), ("a", "is no number"), ("1:", "is no number"), ("4:1", "MIN <= MAX"),
                         ("-1", "is no number"), ("0:2", "1 <= MIN"), ("1:2:3", "is no number"), ("²", "is no number")]
)  # fmt: skip
def test_bounds_that_make_no_sense_are_refused(text, reason):
    with pytest.raises(ConfigError, match=reason):
        Bounds.parse("--target-replicas", text, 1)
