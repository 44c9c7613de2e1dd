"""Metrics of absent services, and sums of their counts."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.orchestration.orchestrator import Orchestrator
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from gateway.telemetry.compatible_metrics import SglangMetrics, VllmMetrics
from gateway.telemetry.metrics import Metrics
from outrider.wire.v1 import common_pb2, target_pb2


class Page:
    """The metrics of a gateway with a draft and two targets, all up, with loads that a test sets."""

    def __init__(self):
        self.metrics = metrics = Metrics()
        self.targets = self.one, self.other = TargetLink("one"), TargetLink("other")
        self.draft = DraftLink("draft", target_pb2.GetTargetInfoResponse().model)
        Orchestrator(self.targets, [self.draft], metrics)
        metrics.registry.register(VllmMetrics(metrics, "tiny"))
        metrics.registry.register(SglangMetrics(metrics, "tiny"))
        for link in (*self.targets, self.draft):
            link.up = True
            link.load.report = common_pb2.EngineLoad(
                running_sessions=5, waiting_sessions=3, free_pages=20, cached_pages=10, total_pages=100,
                step_microseconds=7, drafting_paused=True, preemptions=4, compilations=1,
            )  # fmt: skip

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for family in text_string_to_metric_families(self.metrics.render().decode()):
            yield from ((sample.labels, sample.value) for sample in family.samples if sample.name == name)

    def addresses(self, name: str) -> set[str]:
        return {labels["address"] for labels, _ in self.samples(name)}

    def value(self, name: str) -> float:
        return sum(value for _, value in self.samples(name))


GAUGES = ("running_sessions", "free_pages", "cached_pages", "total_pages", "step_seconds")


@pytest.mark.parametrize("name", ["outrider_queue_depth", *(f"outrider_engine_{gauge}" for gauge in GAUGES)])
def test_a_service_that_is_away_has_neither_sessions_nor_pages(name):
    page = Page()
    assert page.addresses(name) == {"one", "other", "draft"}
    page.one.up = page.draft.up = False
    assert page.addresses(name) == {"other"}
    page.one.up = page.draft.up = True
    assert page.addresses(name) == {"one", "other", "draft"}


def test_an_absent_service_is_excluded_from_compatible_metrics():
    page = Page()
    page.value("outrider_service_up")
    page.one.up = False
    assert page.value("outrider_service_up") == 2
    assert page.addresses("outrider_drafting_paused") == {"other"}
    assert page.value("vllm:num_requests_running") == page.value("sglang:num_running_reqs") == 5
    assert page.value("vllm:num_requests_waiting") == page.value("sglang:num_queue_reqs") == 3
    assert page.value("vllm:kv_cache_usage_perc") == page.value("sglang:token_usage") == pytest.approx(0.8)
    page.other.up = False
    assert page.value("vllm:num_requests_running") == page.value("vllm:kv_cache_usage_perc") == 0


def test_counts_of_an_absent_service_stay():
    page = Page()
    page.value("outrider_service_up")
    page.draft.up = False
    assert page.addresses("outrider_draft_compilations") == {"draft"}
    assert page.addresses("outrider_engine_preemptions") == {"one", "other", "draft"}


def test_sums_of_counts_never_decrease():
    page = Page()
    assert page.value("vllm:num_preemptions_total") == 8
    page.one.up = False
    assert page.value("vllm:num_preemptions_total") == 8
    page.one.up = True
    page.one.load.report = common_pb2.EngineLoad(preemptions=1)  # it restarted
    page.other.load.report = common_pb2.EngineLoad(preemptions=6)
    assert page.value("vllm:num_preemptions_total") == 8 + 1 + 2
    assert page.value("vllm:num_preemptions_total") == 8 + 1 + 2
