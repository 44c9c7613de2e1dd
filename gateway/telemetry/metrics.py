"""Prometheus metrics of the gateway, which sees every request and every commit.

What every commit touches is a plain number, and becomes a metric only when somebody looks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.sessions.session import Session
from gateway.telemetry.draft_metrics import Hints
from outrider.wire.v1 import common_pb2

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
DEEPEST = 64  # accepted tokens of a step that are told apart
_LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Histogram(Collector):
    """A histogram for one thread, without locks."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """bounds: upper ends of the buckets, ascending."""
        self._name, self._text, self._bounds = name, text, list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it."""
        yield self.family(self._name)

    def family(self, name: str, labels: Mapping[str, str] | None = None) -> Metric:
        """The same under any name, with labels."""
        buckets, total = [], 0
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        made = HistogramMetricFamily(name, self._text, labels=list(labels or ()))
        made.add_metric(list((labels or {}).values()), buckets, self._sum)
        return made


@dataclass(eq=False)
class Tally(Collector):
    """What commits add up to, over all sessions."""

    steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    cached: int = 0
    drafts: list[int] = field(default_factory=lambda: [0] * (DEEPEST + 1))  # steps by what they accepted

    def reached(self) -> list[int]:
        """Accepted draft tokens by position, the first is 0, as far as any was accepted, but at least one."""
        # A step that accepted n tokens accepted one at each of the positions 0 .. n - 1.
        counts = list(accumulate(reversed(self.drafts)))[::-1][1:]
        return [count for place, count in enumerate(counts) if count or not place]

    @property
    def accept_length(self) -> float:
        """Tokens per step; 0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft nodes; 0 before the first."""
        return self.accepted / self.verified if self.verified else 0.0

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it."""
        for name, text, value in (
            ("verification_steps", "Commits: steps times the sessions in them.", self.steps),
            ("generated_tokens", "New tokens that were committed.", self.tokens),
            ("verified_draft_tokens", "Draft nodes that were verified.", self.verified),
            ("accepted_draft_tokens", "Draft nodes that were accepted; bonus tokens not counted.", self.accepted),
            (
                "wasted_verification_tokens",
                "Draft nodes that were verified for nothing.",
                self.verified - self.accepted,
            ),
            (
                "drafts",
                "Steps of a session that verified at least one draft node, its first one included.",
                sum(self.drafts),
            ),
            ("cached_prompt_tokens", "Prompt tokens found in a target's prefix cache.", self.cached),
            ("hint_hits", "Decoding steps of a session that verified at least one draft node.", self.hits),
            ("hint_misses", "Decoding steps of a session that had no draft node to verify.", self.misses),
        ):
            yield CounterMetricFamily(f"outrider_{name}", text, value=value)
        positions = CounterMetricFamily(
            "outrider_accepted_draft_tokens_by_position",
            "Draft nodes that were accepted, by how many were accepted before them in their step.",
            labels=("position",),
        )
        for position, count in enumerate(self.reached()):
            positions.add_metric([str(position)], count)
        yield positions
        yield GaugeMetricFamily(
            "outrider_accept_length", "Tokens per step, bonus included, since the start.", self.accept_length
        )
        yield GaugeMetricFamily(
            "outrider_acceptance_rate", "Accepted over verified draft nodes, since the start.", self.acceptance_rate
        )


@dataclass(eq=False)
class Learning(Collector):
    """What drafts have learnt while serving, by address."""

    loads: dict[str, common_pb2.OnlineStats] = field(default_factory=dict)

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it; nothing where no draft learns."""
        for name, text in (
            ("steps", "Steps that drafts have learnt while serving."),
            ("rows", "Rows that they learnt from, repetitions included."),
            ("kept", "New weights of drafts that were better on held-back sessions and were taken over."),
            ("rejected", "New weights of drafts that were not."),
            ("seconds", "Time that drafts took to learn, in seconds."),
        ):
            counter = CounterMetricFamily(f"outrider_online_{name}", text, labels=("address",))
            for address, load in self.loads.items():
                counter.add_metric([address], getattr(load, name))
            yield counter
        for when in ("before", "after"):
            text = f"Accept length of chains on held-back sessions at the last look, {when} what was learnt."
            gauge = GaugeMetricFamily(f"outrider_online_accept_length_{when}", text, labels=("address",))
            for address, load in self.loads.items():
                gauge.add_metric([address], getattr(load, f"accept_length_{when}"))
            yield gauge


@dataclass(eq=False)
class Sum:
    """Of what services count since their start; it never becomes less, though one that starts again begins at 0."""

    total: int = 0
    _counts: dict[str, int] = field(default_factory=dict)  # the last of each service, by address

    def note(self, address: str, count: int) -> None:
        """What a service has counted so far."""
        before = self._counts.get(address, 0)
        self.total += count - before if count >= before else count
        self._counts[address] = count


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.before_render: Callable[[], None] = lambda: None  # sets the gauges of services

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"outrider_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            made = Histogram(f"outrider_{name}", text, bounds)
            registry.register(made)
            return made

        self.requests = counter("requests", "Generations that ended, by how.", ("outcome",))
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.feature_bytes = counter("feature_bytes", "Hidden states that were passed on to drafts, in bytes.")
        self.unreadable = counter(
            "unreadable_hints", "Frames of a draft that could not be read and were dropped.", ("address",)
        )
        self.unreadable_frames = counter(
            "unreadable_frames", "Frames of a target that could not be read, in part or whole.", ("address",)
        )
        self.reopened = counter("reopened_sessions", "Sessions opened again after a service went away.", ("service",))
        for service in ("target", "draft"):
            self.reopened.labels(service)
        self.tally = Tally()
        registry.register(self.tally)
        self.first_token = histogram("time_to_first_token_seconds", "From request to first token.", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Time between commits over their tokens.", _SECONDS)
        self.duration = histogram("request_duration_seconds", "From request to its end.", _SECONDS)
        self.accept_length = histogram(
            "request_accept_length", "Tokens per step of a request, bonus included.", _LENGTHS
        )
        self.running_requests = gauge("running_requests", "Generations under way.")
        replica = ("service", "address")
        self.service_up = gauge("service_up", "1 if a service can be used.", replica)
        self._running = gauge("engine_running_sessions", "Sessions in the engine's batch.", replica)
        self._queue = gauge("queue_depth", "Sessions that wait in the engine.", replica)
        self._free_pages = gauge("engine_free_pages", "KV pages that a session can have, cached ones too.", replica)
        self._cached_pages = gauge("engine_cached_pages", "Free KV pages that keep a cached prefix.", replica)
        self._total_pages = gauge("engine_total_pages", "KV pages in all.", replica)
        self._preemptions = gauge("engine_preemptions", "Sessions that gave their pages back for others.", replica)
        self._plain = gauge("target_plain", "1 while a target decodes plainly, as hints do not pay.", ("address",))
        drafter = ("address", "drafter")
        self._offered = gauge("drafter_offered_nodes", "Nodes of a drafter whose parent was committed.", drafter)
        self._promised = gauge("drafter_promised_nodes", "How many of them its scores said would be.", drafter)
        self._accepted = gauge("drafter_accepted_nodes", "How many of them were.", drafter)
        self._compilations = gauge(
            "draft_compilations", "Programs compiled while serving; none should be.", drafter[:1]
        )
        self.loads: dict[tuple[str, str], common_pb2.EngineLoad] = {}  # the last of each that is up, by its address
        self.target_preemptions = Sum()
        self._hints = Hints()
        registry.register(self._hints)
        self._learning = Learning()
        registry.register(self._learning)
        self._step_seconds = gauge("engine_step_seconds", "Time of the engine's last step.", replica)

    def count(self, session: Session, tokens: int, verified: int, accepted: int, now: float, together: int) -> None:
        """Count what a step, or several plain ones, committed in a session. now: by the clock of time.perf_counter.

        together: tokens that came with it, its own among them; 0 for a commit that came with one before it
        """
        tally, steps = self.tally, 1 if verified else tokens
        if session.steps:
            if together:
                self.inter_token.observe((now - session.committed_at) / together)
            if verified:
                tally.hits += 1
            else:
                tally.misses += steps
        else:
            self.first_token.observe(now - session.opened_at)
            session.first_at = now
        tally.steps += steps
        tally.tokens += tokens
        tally.verified += verified
        tally.accepted += accepted
        if verified:
            tally.drafts[min(accepted, DEEPEST)] += 1
        session.committed_at = now

    def load(self, service: str, address: str, load: common_pb2.EngineLoad) -> None:
        """Note what an engine says of itself."""
        self.loads[service, address] = load
        self._running.labels(service, address).set(load.running_sessions)
        self._queue.labels(service, address).set(load.waiting_sessions)
        self._free_pages.labels(service, address).set(load.free_pages)
        self._cached_pages.labels(service, address).set(load.cached_pages)
        self._total_pages.labels(service, address).set(load.total_pages)
        self._preemptions.labels(service, address).set(load.preemptions)
        self._step_seconds.labels(service, address).set(load.step_microseconds / 1e6)
        if service == "target":
            self._plain.labels(address).set(load.drafting_paused)
            self.target_preemptions.note(address, load.preemptions)
            if load.HasField("draft_stats"):
                self._hints.loads[address] = load.draft_stats
        if service == "draft":
            self._compilations.labels(address).set(load.compilations)
            if load.HasField("online"):
                self._learning.loads[address] = load.online
        for drafter in load.drafters:
            self._offered.labels(address, drafter.name).set(drafter.offered)
            self._promised.labels(address, drafter.name).set(drafter.promised)
            self._accepted.labels(address, drafter.name).set(drafter.accepted)

    def away(self, service: str, address: str) -> None:
        """Forget the sessions and pages of an engine that cannot be reached: they are gone. What it counted stays."""
        held = (self._running, self._queue, self._free_pages, self._cached_pages, self._total_pages, self._step_seconds)
        for gauge in held:
            gauge.remove(service, address)
        if service == "target":
            self._plain.remove(address)

    def render(self) -> bytes:
        """The exposition, as Prometheus reads it."""
        self.loads.clear()
        self.before_render()
        return generate_latest(self.registry)
