"""The plan of large pools: costs from measured windows, traffic of links, and numbers of gateways."""

import math

import pytest

from bench.pools.measures import jain
from bench.pools.reckoned_page import PLANS, check_of, row_of
from bench.pools.reckoning import MAX_GATEWAYS, Costs, Plan, busy, costs_of, frames, reckon

FREE_FRAMES = Costs(frame=0.0, commit=50e-6, commit_bytes=30.0, proposal_bytes=80.0)
BOTH = Costs(frame=100e-6, commit=50e-6, commit_bytes=30.0, proposal_bytes=80.0)
ONLY_FRAMES = Costs(frame=100e-6, commit=0.0)
FEATURES = Costs(frame=0.0, commit=50e-6, feature_byte=1e-9, commit_bytes=30.0)
PLAN = Plan(targets=100, drafts=100, sessions=64, step=0.025, accept_length=4)


@pytest.mark.parametrize(
    ("costs", "plan", "fewest", "most"),
    [
        # 100 targets · 64 sessions / 25 ms = 256,000 commits/s · 50 µs = 12.8 cores, of which each process uses 0.7.
        (FREE_FRAMES, PLAN, 19, 19),
        (FREE_FRAMES, Plan(1, 1, 1, 0.025, 4), 1, 1),
        # 4,000 steps/s of two sessions on different drafts: 28,000 frames/s in one gateway, 32,000 / n in each of more.
        (ONLY_FRAMES, Plan(100, 10**6, 2, 0.025, 4), 5, 5),
        # 200 steps/s, each on four drafts of its own: 2,600 frames/s in one gateway, or 2,000; with 0.26 cores.
        (ONLY_FRAMES, Plan(10, 40, 64, 0.05, 4), 1, 1),
        # 4,000 steps/s with a draft each: 16,000 frames/s in each of up to 64 gateways; beyond, 1,024,000 / n.
        (ONLY_FRAMES, PLAN, 147, 147),
        # In groups of one target and one draft a step has four frames: 160/s in each gateway, which is 0.016 cores.
        (ONLY_FRAMES, Plan(100, 100, 64, 0.025, 4, groups=100), 100, 100),
        (Costs(frame=0.0, commit=1.0), PLAN, None, None),
    ],
)
def test_gateways_are_as_many_as_needed(costs, plan, fewest, most):
    found = reckon(costs, plan)
    assert (found.fewest, found.most) == (fewest, most)
    for count, merged in ((fewest, True), (most, False)):
        assert busy(costs, plan, count or MAX_GATEWAYS, merged=merged) <= 0.7 or count is None
        assert count in (None, plan.groups) or busy(costs, plan, count - plan.groups, merged=merged) > 0.7


@pytest.mark.parametrize(
    ("plan", "gateways", "merged", "spread"),
    [
        (Plan(1, 1, 8, 0.05, 4), 1, 80, 80),  # a commit, one to the draft, a proposal, one to the target
        (Plan(1, 1, 1, 0.05, 4), 2, 40, 40),  # the session is on one of two gateways
        (Plan(1, 2, 1000, 0.05, 4), 1, 20 * 6, 20 * 7),  # two drafts, and what comes from both merges to the target
        (Plan(1, 2, 1, 0.05, 4), 1, 20 * 4, 20 * 4),  # one session has one draft
        (Plan(8, 8, 32, 0.05, 4), 1, 160 * 4, 160 * 4),  # sessions of a draft are on one target
        (Plan(8, 1, 32, 0.05, 4, draft_step=0.01), 1, 360, 160 * 3 + 100),  # a draft's step answers several targets'
        (Plan(10, 10, 64, 0.05, 4, groups=10), 10, 80, 80),
        (Plan(10, 10, 64, 0.05, 4, groups=10), 20, 80, 80),  # both gateways of a group have sessions on its target
    ],
)
def test_frames_are_spread_over_drafts_or_merged(plan, gateways, merged, spread):
    assert frames(plan, gateways, merged=False) == pytest.approx(spread)
    assert frames(plan, gateways, merged=True) == pytest.approx(merged)


def test_links_carry_what_their_replicas_do():
    """2,560 commits/s of a target: 30 bytes each from it, 80 bytes of proposals to it."""
    found = reckon(FREE_FRAMES, PLAN)
    assert (found.target_out, found.target_in) == pytest.approx((76_800, 204_800))
    assert (found.draft_in, found.draft_out) == pytest.approx((76_800, 204_800))
    assert found.gateway == pytest.approx(100 * (76_800 + 204_800) / 19)
    assert found.stream == pytest.approx((76_800 + 204_800) / 19)
    few = reckon(FREE_FRAMES, Plan(100, 25, 64, 0.025, 4))
    assert (few.draft_in, few.draft_out) == pytest.approx((4 * 76_800, 4 * 204_800))
    assert (few.target_in, few.fewest) == (found.target_in, found.fewest)


def test_hidden_states_count_as_bytes_and_as_processor_time():
    without, states = reckon(FEATURES, PLAN), reckon(FEATURES, Plan(100, 100, 64, 0.025, 4, row_bytes=8192))
    assert states.target_out - without.target_out == pytest.approx(2560 * 4 * 8192)
    # 84 MB/s of each target, 8.4 GB/s of all: 8.4 cores beside 12.8.
    assert (without.fewest, states.fewest) == (19, math.ceil((12.8 + 100 * 2560 * 4 * 8192 * 1e-9) / 0.7))


def windows(frame, commit, loads=((100, 1000), (100, 50), (400, 3000), (50, 10))):
    return [
        {
            "frames/s": frames, "commits/s": commits, "gateway cores": frame * frames + commit * commits,
            "commit bytes/s": 30.0 * commits, "proposal bytes/s": 80.0 * commits, "feature bytes/s": 0.0,
        }
        for frames, commits in loads
    ]  # fmt: skip


@pytest.mark.parametrize(("frame", "commit"), [(100e-6, 50e-6), (0.0, 50e-6), (100e-6, 0.0)])
def test_costs_are_those_that_explain_the_windows(frame, commit):
    costs = costs_of(windows(frame, commit))
    assert (costs.frame, costs.commit) == pytest.approx((frame, commit), abs=1e-12)
    assert (costs.commit_bytes, costs.proposal_bytes, costs.feature_byte) == pytest.approx((30.0, 80.0, 0.0))


def test_costs_are_never_negative():
    """Windows whose best explanation has a negative cost of a frame, and windows that do not tell the costs apart."""
    odd = [row | {"gateway cores": 50e-6 * row["commits/s"] - 1e-7 * row["frames/s"]} for row in windows(0.0, 50e-6)]
    assert costs_of(odd).frame == 0.0
    alike = costs_of(windows(100e-6, 50e-6, ((100, 1000), (200, 2000))))
    assert 100 * alike.frame + 1000 * alike.commit == pytest.approx(0.06)


def test_hidden_states_cost_what_the_rest_does_not_explain():
    (load,) = windows(100e-6, 50e-6, ((100, 1000),))
    load |= {"gateway cores": load["gateway cores"] + 0.2, "feature bytes/s": 1e8}
    assert costs_of(windows(100e-6, 50e-6), [load]).feature_byte == pytest.approx(2e-9)
    load["gateway cores"] = 0.01
    assert costs_of(windows(100e-6, 50e-6), [load]).feature_byte == 0.0


def test_every_plan_of_the_page_has_a_row():
    rows = [row_of(BOTH, plan) for plan in PLANS]
    assert sum(row["targets"] == 100 for row in rows) >= 5
    assert len({tuple(row) for row in rows}) == 1
    assert row_of(Costs(0.0, 1.0), PLAN)["gateways, merged"] == "no number is enough"


def test_the_formulas_are_compared_with_measured_windows():
    window = {
        "targets": 2, "drafts": 1, "sessions": 16, "step, ms": 50.0, "draft's step, ms": 10.0, "accept length": 3.0,
        "commits/s": 160.0, "frames/s": 90.0, "gateway cores": 0.1,
    }  # fmt: skip
    row = check_of(BOTH, window)  # the commits show that steps took 100 ms: 20 of them in a second
    assert (row["frames/s"], row["merged"], row["spread"]) == ("90", "60", "80")
    assert row["merged, cores"] == pytest.approx(60 * 100e-6 + 160 * 50e-6)
    assert row["spread, cores"] == pytest.approx(80 * 100e-6 + 160 * 50e-6)


@pytest.mark.parametrize(
    ("shares", "index"), [([5, 5, 5], 1.0), ([9, 0, 0], 1 / 3), ([1, 2, 3], 36 / 42), ([0, 0], 1.0)]
)
def test_fairness(shares, index):
    assert jain(shares) == pytest.approx(index)
