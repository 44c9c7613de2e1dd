"""CPU cores of each process."""

import os

import pytest

from outrider.config import DraftOptions, ServeConfig
from outrider.errors import ConfigError
from outrider.placement.cores import CorePlan, choose_cores, plan_cores


@pytest.mark.parametrize(
    ("count", "algorithm", "sizes"),
    [
        (4, "NGRAM", (2, 1, 1)),
        (4, "STANDALONE", (2, 1, 1)),
        (4, "NONE", (3, 0, 1)),
        (8, "STANDALONE", (5, 2, 1)),
        (8, "EAGLE", (5, 2, 1)),
        (8, "EAGLE3", (5, 2, 1)),
        (16, "STANDALONE", (11, 4, 1)),
        (64, "NGRAM", (62, 1, 1)),
    ],
)
def test_from_four_cores_on_processes_share_no_core(count, algorithm, sizes):
    plan = plan_cores(range(10, 10 + count), algorithm)
    sets = (plan.target, plan.draft, plan.gateway)
    assert tuple(map(len, sets)) == sizes
    assert sorted(core for cores in sets for core in cores) == list(range(10, 10 + count))


@pytest.mark.parametrize(
    ("cores", "algorithm", "plan"),
    [
        ([5], "STANDALONE", CorePlan((5,), (5,), (5,))),
        ([0, 1], "EAGLE3", CorePlan((0, 1), (1,), (0, 1), niceness=15, shared=(0, 1))),
        ([0, 1], "STANDALONE", CorePlan((0, 1), (0, 1), (0, 1), niceness=15)),
        ([0, 1], "NGRAM", CorePlan((0, 1), (0, 1), (0, 1), niceness=15)),
        ([0, 1], "NONE", CorePlan((0, 1), (0, 1), (0, 1), niceness=15)),
        ([2, 4, 6], "STANDALONE", CorePlan((2, 4), (6,), (6,))),
    ],
)
def test_small_machines_share(cores, algorithm, plan):
    assert plan_cores(cores, algorithm) == plan


def test_the_users_cores_are_kept():
    core = min(os.sched_getaffinity(0))
    draft = DraftOptions(speculative_algorithm="STANDALONE")
    plan = choose_cores(ServeConfig(draft=draft, cores=str(core)))
    assert plan == CorePlan((core,), (core,), (core,))
    usable = sorted(os.sched_getaffinity(0))
    plan = choose_cores(ServeConfig(draft=draft, cores_target=f"{usable[-1]}"))
    assert plan.target == (usable[-1],)
    assert plan.gateway == plan_cores(usable, "STANDALONE").gateway


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_draft_on_cores_of_its_own_has_no_niceness():
    first, second, *_ = map(str, sorted(os.sched_getaffinity(0)))
    both = f"{first},{second}"
    for target, niceness in ((first, 0), (both, plan_cores([0, 1], "EAGLE3").niceness)):
        config = ServeConfig(
            draft=DraftOptions(speculative_algorithm="EAGLE3"), cores=both, cores_target=target, cores_draft=second
        )
        assert choose_cores(config).niceness == niceness


def test_missing_cores_are_refused():
    with pytest.raises(ConfigError, match="core 9999 cannot be used"):
        choose_cores(ServeConfig(cores_gateway="9999"))
    with pytest.raises(ConfigError, match="no list of cores"):
        choose_cores(ServeConfig(cores="a-b"))
    with pytest.raises(ConfigError, match="no list of cores"):
        choose_cores(ServeConfig(cores="3-1"))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_network_threads_of_a_draft_use_all_cores_unless_its_cores_are_set():
    first, second, *_ = map(str, sorted(os.sched_getaffinity(0)))
    draft = DraftOptions(speculative_algorithm="EAGLE3")
    plan = choose_cores(ServeConfig(draft=draft, cores=f"{first},{second}"))
    assert (plan.draft, plan.network) == ((int(second),), (int(first), int(second)))
    plan = choose_cores(ServeConfig(draft=draft, cores=f"{first},{second}", cores_draft=second))
    assert plan.network == plan.draft == (int(second),)
