"""Metrics of the services behind the gateway, by replica, from the loads that their engines report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.streams.availability import ReplicaState
from outrider.wire.v1 import common_pb2

CAUSES = ("without_drafter", "paused", "late", "empty", "not_selected")
_LAGS = ("0.0", "1.0", "2.0", "4.0", "8.0", "16.0", "32.0", "+Inf")  # bounds of the wire's DraftStats.lag_histogram

# Gauges by replica: field of EngineLoad, metric, help. A replica that is away has no value of the first group.
_STATE = (
    ("running_sessions", "engine_running_sessions", "Sessions in the engine's batch."),
    ("waiting_sessions", "queue_depth", "Sessions in the engine's admission queue."),
    ("free_pages", "engine_free_pages", "KV pages that a session can lease, including cached ones."),
    ("cached_pages", "engine_cached_pages", "Free KV pages that hold a cached prefix."),
    ("total_pages", "engine_total_pages", "KV pages in all."),
)
_COUNTS = (("preemptions", "engine_preemptions", "Sessions whose pages were taken for other sessions."),)
# Gauges by drafter: field of DrafterStats, metric, help.
_DRAFTER = (
    ("offered", "drafter_proposed_tokens", "Draft tokens of a drafter whose parent was committed."),
    ("promised", "drafter_expected_tokens", "Number of those that the drafter's scores predicted to be accepted."),
    ("accepted", "drafter_accepted_tokens", "Number of those that were accepted."),
)
_ONLINE = (
    ("steps", "online_steps", "Training steps of drafts while serving."),
    ("rows", "online_tokens", "Tokens in those training steps, repetitions included."),
    ("kept", "online_kept", "New draft weights that improved held-back sessions and were taken over."),
    ("rejected", "online_rejected", "New draft weights that did not."),
    ("seconds", "online_seconds", "Time in those training steps, in seconds."),
)


@dataclass(eq=False)
class DraftStatsCollector(Collector):
    """Draft stats that targets report, by address. A target counts the drafts of all gateways."""

    stats: dict[str, common_pb2.DraftStats] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Metric families, without a target that has not received a draft token yet."""
        for name, text, attribute in (
            ("received_draft_tokens", "Draft tokens that a target received.", "received_tokens"),
            ("unverified_draft_tokens", "Received draft tokens that were never verified.", "unverified_tokens"),
        ):
            counter = CounterMetricFamily(f"outrider_{name}", text, labels=("address",))
            for address, stats in self.stats.items():
                counter.add_metric([address], getattr(stats, attribute))
            yield counter
        steps = CounterMetricFamily(
            "outrider_steps_without_draft_by_cause",
            "Decoding steps of a session without a draft token to verify, by cause.",
            labels=("address", "cause"),
        )
        lag = HistogramMetricFamily(
            "outrider_draft_lag_tokens", "Draft lag: tokens that a proposal was behind the target when it arrived.",
            labels=("address",),
        )  # fmt: skip
        for address, stats in self.stats.items():
            for cause in CAUSES:
                steps.add_metric([address, cause], getattr(stats, f"steps_{cause}"))
            counts = [float(count) for count in accumulate(stats.lag_histogram)]
            lag.add_metric([address], list(zip(_LAGS, counts, strict=False)), stats.lag_tokens)
        yield steps
        yield lag


@dataclass(eq=False)
class OnlineStatsCollector(Collector):
    """Online training of drafts, by address."""

    stats: dict[str, common_pb2.OnlineStats] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """Metric families; without values where no draft is trained online."""
        for attribute, name, text in _ONLINE:
            counter = CounterMetricFamily(f"outrider_{name}", text, labels=("address",))
            for address, stats in self.stats.items():
                counter.add_metric([address], getattr(stats, attribute))
            yield counter
        for when in ("before", "after"):
            text = f"Accept length of draft chains on held-back sessions at the last evaluation, {when} training."
            gauge = GaugeMetricFamily(f"outrider_online_accept_length_{when}", text, labels=("address",))
            for address, stats in self.stats.items():
                gauge.add_metric([address], getattr(stats, f"accept_length_{when}"))
            yield gauge


@dataclass(eq=False)
class MonotonicSum:
    """Sum of what services count. It never decreases, although a service that restarts begins at 0."""

    total: int = 0
    _counts: dict[str, int] = field(default_factory=dict)  # the last of each service, by address

    def update(self, address: str, count: int) -> None:
        """A service has counted this much since its start."""
        before = self._counts.get(address, 0)
        self.total += count - before if count >= before else count
        self._counts[address] = count


class ServiceMetrics:
    """Metrics of targets and drafts. Lives in one event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"outrider_{name}", text, labels, registry=registry)

        replica = ("service", "address")
        self.up = gauge("service_up", "1 if a service is connected.", *replica)
        self._states = gauge("service_state", "1 for the state of a service, 0 for the others.", *replica, "state")
        self._awaited = gauge(
            "awaited_weights", "1 for the label of weights that a target lacks; it is unused until they are sent.",
            "address", "weight_version",
        )  # fmt: skip
        self.reopened = counter("reopened_sessions", "Sessions opened again after a service was lost.", ("service",))
        for service in ("target", "draft"):
            self.reopened.labels(service)
        self.feature_bytes = counter("feature_bytes", "Hidden states relayed to drafts, in bytes.")
        self.unreadable_proposals = counter(
            "unreadable_proposals", "Frames of a draft that could not be decoded and were dropped.", ("address",)
        )
        self.unreadable_frames = counter(
            "unreadable_frames", "Frames of a target that could not be decoded, in part or whole.", ("address",)
        )
        self.loads: dict[tuple[str, str], common_pb2.EngineLoad] = {}  # of the services that are up
        self.target_preemptions = MonotonicSum()
        self._gauges = {field: gauge(name, text, *replica) for field, name, text in (*_STATE, *_COUNTS)}
        self._step_seconds = gauge("engine_step_seconds", "Duration of the engine's last step, in seconds.", *replica)
        self._paused = gauge(
            "drafting_paused", "1 while a target decodes plainly because speculation does not pay.", "address"
        )
        self._drafters = {field: gauge(name, text, "address", "drafter") for field, name, text in _DRAFTER}
        self._compilations = gauge("draft_compilations", "Programs compiled while serving; expected are 0.", "address")
        self._draft_stats, self._online = DraftStatsCollector(), OnlineStatsCollector()
        registry.register(self._draft_stats)
        registry.register(self._online)

    def set_state(self, service: str, address: str, present: str) -> None:
        """A service is in this state now."""
        for state in ReplicaState:
            self._states.labels(service, address, state.value).set(state == present)

    def set_awaited(self, versions: Mapping[str, str]) -> None:
        """The labels of the weights that targets await, by address."""
        self._awaited.clear()
        for address, version in versions.items():
            self._awaited.labels(address, version).set(1)

    def update(self, service: str, address: str, load: common_pb2.EngineLoad) -> None:
        """A service that is up reported this load last."""
        self.loads[service, address] = load
        for field_name, gauge in self._gauges.items():
            gauge.labels(service, address).set(getattr(load, field_name))
        self._step_seconds.labels(service, address).set(load.step_microseconds / 1e6)
        if service == "target":
            self._paused.labels(address).set(load.drafting_paused)
            self.target_preemptions.update(address, load.preemptions)
            if load.HasField("draft_stats"):
                self._draft_stats.stats[address] = load.draft_stats
        if service == "draft":
            self._compilations.labels(address).set(load.compilations)
            if load.HasField("online"):
                self._online.stats[address] = load.online
        for drafter in load.drafters:
            for field_name, gauge in self._drafters.items():
                gauge.labels(address, drafter.name).set(getattr(drafter, field_name))

    def forget(self, service: str, address: str) -> None:
        """A replica has left its pool: nothing more is reported of it."""
        self.remove(service, address)
        self.up.remove(service, address)
        for state in ReplicaState:
            self._states.remove(service, address, state.value)
        for field_name, _, _ in _COUNTS:
            self._gauges[field_name].remove(service, address)
        if service == "draft":
            self._compilations.remove(address)
        self._draft_stats.stats.pop(address, None)
        self._online.stats.pop(address, None)

    def remove(self, service: str, address: str) -> None:
        """A service is away: its sessions and pages are gone. Counts stay."""
        for field_name, _, _ in _STATE:
            self._gauges[field_name].remove(service, address)
        self._step_seconds.remove(service, address)
        if service == "target":
            self._paused.remove(address)
