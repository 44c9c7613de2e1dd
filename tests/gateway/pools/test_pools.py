"""Routing of sessions, with links without services."""

import itertools
import random

import pytest

from gateway.orchestration.generator import Generator
from gateway.orchestration.orchestrator import Orchestrator
from gateway.pools.placement import Placement
from gateway.pools.pool import Routing
from gateway.sessions.prefixes import CachedPrefixes, PrefixHashes
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.streams.pool_weights import PoolWeights
from gateway.streams.replica.step_time import StepTime
from gateway.streams.target import TargetLink
from gateway.telemetry.metrics import Metrics
from outrider.errors import ConfigError, Unavailable
from outrider.speculation.proposal import FinishReason
from outrider.wire.v1 import common_pb2, draft_pb2, target_pb2
from tests.support.gateway.requests import request_for

PAGE = 16
IDS = itertools.count(1)


def prompt(family, pages=4):
    """Pages of tokens that are shared within a family of prompts."""
    return [family] * (pages * PAGE) + [250]


def session(tokens, max_tokens=5, **options):
    return Session(next(IDS), request_for(tokens, max_tokens, **options))


def target(slots=8, longest=1000, pages=0):
    link = TargetLink("unix:/nowhere")
    link.up = True
    link.info = target_pb2.GetTargetInfoResponse(page_size=PAGE, max_running_sessions=slots, max_session_tokens=longest)
    link.load.report = common_pb2.EngineLoad(total_pages=pages)
    return link


def draft(*kinds, slots=8, longest=0):
    link = DraftLink("unix:/nowhere", common_pb2.ModelInfo())
    link.up = True
    link.info = draft_pb2.GetDraftInfoResponse(
        drafters=kinds or ["NGRAM"], max_running_sessions=slots, max_session_tokens=longest
    )
    return link


@pytest.mark.parametrize("link", [target(), draft()], ids=["target", "draft"])
def test_many_sessions_are_opened_in_frames_that_fit(link):
    """A service that comes back gets many; other messages follow them."""
    for i in range(5):
        link.open(common_pb2.OpenSession(session_id=i, tokens=bytes(6 << 20)))
    link.close(3)
    frames = []
    while link.stream.outgoing.is_set:
        link.stream.outgoing.clear()
        frames.append(link.take_frame())
    assert [[opened.session_id for opened in frame.opens] for frame in frames] == [[0, 1], [2, 3], [4]]
    assert [bool(frame.closes) for frame in frames] == [False, False, True]
    link.open(common_pb2.OpenSession(tokens=bytes(20 << 20)))
    assert len(link.take_frame().opens) == 1


class Pools:
    """A placement in which sessions are placed."""

    def __init__(self, *links, **rules):
        self.metrics = Metrics()
        self.placement = Placement(self.metrics, Routing(**rules))
        for link in links:
            self.placement.add(link)

    def open(self, tokens, **options):
        one = session(tokens, **options)
        self.placement.place_on_draft(one)
        self.placement.place_on_target(one)
        return one

    def routed(self, reason, service="target"):
        name, labels = "outrider_routed_sessions_total", {"service": service, "by": reason}
        return self.metrics.registry.get_sample_value(name, labels) or 0


def test_a_prompt_is_routed_to_its_cached_prefix():
    links = [target(), target(), target()]
    pools = Pools(*links)
    firsts = [pools.open(prompt(family)).target for family in range(3)]
    assert set(firsts) == set(links)  # they share no prefix
    for family in (2, 0, 1, 1, 0, 2):
        assert pools.open([*prompt(family, 6), 7]).target is firsts[family]
    assert (pools.routed("load"), pools.routed("prefix")) == (3, 6)
    assert pools.open(prompt(1), cache_salt="a tenant").failures.target == 0
    assert pools.routed("load") == 4  # another salt shares no prefix


def test_an_answer_counts_as_cached_after_its_end():
    links = [target(), target()]
    pools = Pools(*links)
    one = pools.open([1, 2, 3])
    one.commit(list(range(100, 164)), 0, 0, FinishReason.STOP)
    home = one.target
    pools.placement.leave(one)
    assert home.load.session_count == 0
    pools.open([9])  # on the first, which is idle
    assert pools.open([*one.tokens, 4, 5]).target is home
    assert pools.routed("prefix") == 1


def test_a_busy_replica_is_avoided():
    links = [target(slots=64), target(slots=64)]
    pools = Pools(*links, balance_abs_threshold=4, balance_rel_threshold=2.0)
    home = pools.open(prompt(1)).target
    other = links[1 - links.index(home)]
    for _ in range(4):
        assert pools.open(prompt(1)).target is home
    assert pools.open(prompt(1)).target is other  # 5 sessions against none
    assert pools.routed("busy") == 1
    assert pools.open([*prompt(1), 4]).target is other  # which has the prefix now, and a lower load


def test_a_full_replica_is_avoided():
    links = [target(slots=2), target(slots=2)]
    pools = Pools(*links)
    home = pools.open(prompt(1)).target
    assert pools.open(prompt(1)).target is home
    assert pools.open(prompt(1)).target is not home


def test_routing_by_load_only():
    links = [target(), target()]
    pools = Pools(*links, cache_threshold=1.0)
    assert [pools.open(prompt(1)).target for _ in range(4)] == [*links, *links]


def test_a_larger_target_gets_more_sessions():
    small, large = target(slots=4), target(slots=12)
    pools = Pools(small, large)
    for family in range(16):
        pools.open(prompt(family))
    assert (small.load.session_count, large.load.session_count) == (4, 12)


@pytest.mark.parametrize(("targets", "drafts", "most"), [(4, 4, 1.1), (6, 2, 1.3), (16, 4, 1.3), (2, 6, 4.8)])
def test_sessions_of_a_draft_go_to_the_same_targets(targets, drafts, most):
    """Each step of a target costs a frame for each draft of its sessions. By load alone, nearly all targets and drafts
    have sessions in common where there are more of one than of the other."""
    links, chance = [target(slots=64) for _ in range(targets)], random.Random(1)
    pools = Pools(*links, *(draft(slots=256) for _ in range(drafts)))
    sessions, shared = [], []
    for family in range(1500):
        if len(sessions) < 15 * targets or (len(sessions) < 25 * targets and chance.random() < 0.5):
            sessions.append(pools.open(prompt(family)))
        else:
            pools.placement.leave(sessions.pop(chance.randrange(len(sessions))))
        shared += [len(pools.placement.drafts_of(link)) for link in links]
    counts = [link.load.session_count for link in links]
    assert max(counts) - min(counts) <= 6
    assert sum(shared) / len(shared) <= most
    for one in sessions:
        pools.placement.leave(one)
    assert not any(pools.placement.drafts_of(link) for link in links)


def reports(link, milliseconds, count=40):
    """Make a link's steps take so long."""
    for _ in range(count):
        link.update_load(common_pb2.EngineLoad(running_sessions=1, step_microseconds=int(1000 * milliseconds)))


@pytest.mark.parametrize(
    ("slots", "milliseconds", "shares"),
    [((64, 64), (20, 10), (8, 16)), ((64, 64), (10, 11), (12, 12)), ((64, 32), (10, 20), (19, 5))],
)
def test_targets_get_sessions_in_proportion_to_what_they_do(slots, milliseconds, shares):
    """By the durations of their steps and by their slots; small differences are chance."""
    links = [target(slots=count) for count in slots]
    pools = Pools(*links)
    for link, step in zip(links, milliseconds, strict=True):
        reports(link, step)
    for family in range(24):
        pools.open(prompt(family))
    assert tuple(link.load.session_count for link in links) == shares


def test_a_slow_target_is_measured_anew_after_a_while():
    now = 0.0
    links = [target(), target()]
    pools = Pools(*links)
    for link, step in zip(links, (40, 10), strict=True):
        link.load.step_time = StepTime(lambda: now)
        reports(link, step)
    reports(links[0], 60_000, 1)  # one step in which it compiled, say
    assert links[0].load.step_time.seconds == pytest.approx(0.04, rel=0.6)

    def chosen():
        one = pools.open(prompt(next(IDS)))
        home = links.index(one.target)
        pools.placement.leave(one)
        return home

    assert [chosen() for _ in range(3)] == [1, 1, 1]
    now = 200.0
    assert 0 in [chosen() for _ in range(3)]


def test_a_session_is_routed_to_a_context_that_holds_it():
    small, large = target(longest=100), target(longest=200)
    pools = Pools(small, large)
    assert [pools.open([1] * 60, max_tokens=60).target for _ in range(3)] == [large] * 3
    assert pools.open([2] * 60, max_tokens=40).target is small
    large.up = False
    assert pools.open([1] * 60, max_tokens=60).target is None
    assert not pools.placement.refused(session([1] * 60, max_tokens=60), small)


def test_a_lost_target_counts_as_empty():
    links = [target(), target()]
    pools = Pools(*links)
    one = pools.open(prompt(1))
    home, other = one.target, links[1 - links.index(one.target)]
    pools.placement.leave(one)
    home.up = False
    pools.placement.lost(home)
    again = pools.open(prompt(1))
    assert again.target is other
    home.up = True
    assert pools.open(prompt(1)).target is other
    assert pools.open(prompt(2)).target is home  # used again as the least loaded


def test_cached_prefixes_are_bounded_and_have_no_gaps():
    prefixes, names = CachedPrefixes(), PrefixHashes().of(list(range(160)), PAGE)
    others = PrefixHashes().of(list(range(1000, 1064)), PAGE)
    prefixes.add(names, 12)
    assert prefixes.match(names) == 10
    prefixes.add(others, 12)
    assert (len(prefixes), prefixes.match(names), prefixes.match(others)) == (12, 8, 4)
    prefixes.add(names[:4], 12)
    prefixes.add(PrefixHashes("salt").of(list(range(160)), PAGE), 12)
    assert (len(prefixes), prefixes.match(others)) == (12, 0)
    assert 0 < prefixes.match(names) <= 4
    prefixes.add(names, 3)
    assert (len(prefixes), prefixes.match(names)) == (3, 3)


def test_hashes_of_a_growing_text_equal_those_of_the_whole():
    tokens = [token % 97 for token in range(200)]
    growing = PrefixHashes("x")
    for end in (3, 16, 17, 100, 200):
        assert growing.of(tokens[:end], PAGE) == PrefixHashes("x").of(tokens[:end], PAGE)
    assert len(growing.of(tokens, PAGE)) == 12
    assert growing.of(tokens, PAGE) != PrefixHashes("y").of(tokens, PAGE)


def test_drafts_of_the_first_kind_with_a_free_slot_are_preferred():
    heads = [draft("EAGLE3", slots=2, longest=50), draft("EAGLE3", slots=2, longest=50)]
    ngram = draft("NGRAM", slots=2)
    pools = Pools(target(slots=64), heads[0], ngram, heads[1])
    assert pools.open([1] * 60).draft is ngram  # beyond the heads' context
    assert [pools.open([2]).draft for _ in range(4)] == [heads[0], heads[1], heads[0], heads[1]]
    assert pools.open([2]).draft is ngram
    assert pools.open([2]).draft in heads  # all are full: the first kind again
    assert pools.open([2], max_draft_tokens=0).draft is None


def test_a_session_beyond_a_draft_s_context_needs_n_grams():
    head, both = draft("EAGLE3", longest=50), draft("NGRAM", "EAGLE3", longest=50)
    assert Pools(target(), head).open([1] * 50).draft is None
    assert Pools(target(), head).open([1] * 49).draft is head
    assert Pools(target(), head, both).open([1] * 50).draft is both
    assert head.load.session_count == 1


@pytest.mark.parametrize(
    ("rules", "flag"),
    [
        ({"cache_threshold": 1.5}, "--cache-threshold"),
        ({"balance_abs_threshold": -1}, "--balance-abs-threshold"),
        ({"balance_rel_threshold": 0.5}, "--balance-rel-threshold"),
    ],
)
def test_wrong_rules(rules, flag):
    with pytest.raises(ConfigError, match=flag):
        Routing(**rules)


def test_targets_of_other_number_formats_are_refused():
    link = target()
    facts = target_pb2.GetTargetInfoResponse(kv_cache_dtype="float8_e4m3fn")
    facts.MergeFrom(link.info)
    link.info.kv_cache_dtype = "bfloat16"
    with pytest.raises(ConfigError, match="--kv-cache-dtype bfloat16"):
        link.expect(PoolWeights(facts))
    link.info.kv_cache_dtype = "float8_e4m3fn"
    link.expect(PoolWeights(facts))
    link.info.quantization = "int8"
    with pytest.raises(ConfigError, match="--quantization int8, the others of its pool with none"):
        link.expect(PoolWeights(facts))
    facts.quantization = "int8"
    link.expect(PoolWeights(facts))
    link.info.quantization = facts.quantization = ""
    link.info.weight_formats["Q4_K"] = 3
    with pytest.raises(ConfigError, match="--quantization Q4_K, the others of its pool with none"):
        link.expect(PoolWeights(facts))


async def test_a_session_waits_for_a_target_that_holds_it_and_then_fails():
    small, large = target(longest=100), target(longest=200)
    orchestrator = Orchestrator([small, large], [], Metrics(), resume_timeout=0.05)
    for link in (small, large):
        link.events.up()
    assert orchestrator.sessions.max_session_tokens == 200
    one = orchestrator.sessions.open(request_for([1] * 60, 60))
    assert one.target is large
    large.up = False
    large.events.down()
    assert one.target is None
    other = orchestrator.sessions.open(request_for([1] * 60, 10))
    assert other.target is small  # other sessions run there
    large.up = True
    large.events.up()
    assert one.target is large
    large.up = False
    large.events.down()
    with pytest.raises(Unavailable, match="no target that holds 120 tokens"):
        await one.inbox.next()
    assert list(orchestrator.sessions.by_id.values()) == [other]
    orchestrator.sessions.close(other)
    assert (small.load.session_count, large.load.session_count, orchestrator.sessions.waiting) == (0, 0, 0)


def test_the_context_is_that_of_the_largest_target_s_last_report():
    """The context before a restart does not count, because no target could hold it."""
    small, large = target(longest=100), target(longest=200)
    orchestrator = Orchestrator([small, large], [], Metrics())
    generator = Generator(orchestrator, None, Metrics(), name="", vocab_size=9, max_session_tokens=100)
    for link in (small, large):
        link.events.up()
    assert generator.max_session_tokens == 200
    large.up = False
    large.events.down()
    assert generator.max_session_tokens == 200  # longer sessions wait for the large one
    large.info.max_session_tokens = 150
    large.up = True
    large.events.up()
    assert generator.max_session_tokens == 150
