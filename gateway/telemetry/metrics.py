"""Prometheus metrics of the gateway, which sees every request and every commit.

The counts that every commit changes are plain numbers; they become metrics when Prometheus reads them.
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
from gateway.sessions.step_stats import SourceCounts, add_counts
from gateway.streams.traffic import Traffic
from gateway.telemetry.service_metrics import ServiceMetrics
from gateway.telemetry.stream_metrics import TrafficCollector
from outrider.speculation.draft_source import SourceKind

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
MAX_POSITIONS = 64  # positions of accepted draft tokens in a step that are counted apart
_LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Histogram(Collector):
    """A histogram for one thread, without locks."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """bounds: upper bounds of the buckets, ascending."""
        self._name, self._text, self._bounds = name, text, list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """The metric family."""
        yield self.family(self._name)

    def family(self, name: str, labels: Mapping[str, str] | None = None) -> Metric:
        """The metric family under another name and with labels."""
        buckets, total = [], 0
        for bound, count in zip([*map(float, self._bounds), float("inf")], self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        made = HistogramMetricFamily(name, self._text, labels=list(labels or ()))
        made.add_metric(list((labels or {}).values()), buckets, self._sum)
        return made


@dataclass(eq=False)
class Tally(Collector):
    """Sums of all commits, over all sessions."""

    steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0
    steps_with_draft: int = 0
    steps_without_draft: int = 0
    cached: int = 0
    sources: SourceCounts = field(default_factory=dict)
    drafts: list[int] = field(default_factory=lambda: [0] * (MAX_POSITIONS + 1))  # steps by accepted draft tokens

    def accepted_by_position(self) -> list[int]:
        """Accepted draft tokens by position from 0 on, up to the last position with any, but at least one."""
        # A step that accepted n tokens accepted one at each of the positions 0 .. n - 1.
        counts = list(accumulate(reversed(self.drafts)))[::-1][1:]
        return [count for position, count in enumerate(counts) if count or not position]

    @property
    def accept_length(self) -> float:
        """Tokens per step; 0 before the first step."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 before the first."""
        return self.accepted / self.verified if self.verified else 0.0

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        for name, text, value in (
            ("verification_steps", "Commits: steps times the sessions in them.", self.steps),
            ("generated_tokens", "New tokens that were committed.", self.tokens),
            ("verified_draft_tokens", "Draft tokens that were verified.", self.verified),
            ("accepted_draft_tokens", "Draft tokens that were accepted, without bonus tokens.", self.accepted),
            ("rejected_draft_tokens", "Draft tokens that were verified and rejected.", self.verified - self.accepted),
            (
                "drafts",
                "Steps of a session that verified at least one draft token, including its first step.",
                sum(self.drafts),
            ),
            ("cached_prompt_tokens", "Prompt tokens found in a target's prefix cache.", self.cached),
            (
                "steps_with_draft",
                "Decoding steps of a session that verified at least one draft token.",
                self.steps_with_draft,
            ),
            (
                "steps_without_draft",
                "Decoding steps of a session without a draft token to verify.",
                self.steps_without_draft,
            ),
        ):
            yield CounterMetricFamily(f"outrider_{name}", text, value=value)
        positions = CounterMetricFamily(
            "outrider_accepted_draft_tokens_by_position",
            "Draft tokens that were accepted, by the number of tokens accepted before them in their step.",
            labels=("position",),
        )
        for position, count in enumerate(self.accepted_by_position()):
            positions.add_metric([str(position)], count)
        yield positions
        verified = CounterMetricFamily(
            "outrider_verified_draft_tokens_by_source",
            "Draft tokens that were verified, by draft source: the draft service, or one of the target's own.",
            labels=("source",),
        )
        accepted = CounterMetricFamily(
            "outrider_accepted_draft_tokens_by_source",
            "Draft tokens that were accepted, by draft source.",
            labels=("source",),
        )
        for kind in SourceKind:
            for family, count in zip((verified, accepted), self.sources.get(kind, (0, 0)), strict=True):
                family.add_metric([kind.label], count)
        yield from (verified, accepted)
        yield GaugeMetricFamily(
            "outrider_accept_length", "Tokens per step since the start, bonus token included.", self.accept_length
        )
        yield GaugeMetricFamily(
            "outrider_acceptance_rate", "Accepted over verified draft tokens since the start.", self.acceptance_rate
        )


def unread_answers(registry: CollectorRegistry) -> Counter:
    """The count of answers that were cut."""
    text = "Answers that were cut because their client did not read them."
    return Counter("outrider_unread_answers", text, registry=registry)


class Metrics:
    """All metrics of a model, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.before_render: Callable[[], None] = lambda: None  # updates the metrics of services

        def histogram(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            made = Histogram(f"outrider_{name}", text, bounds)
            registry.register(made)
            return made

        self.requests = Counter(
            "outrider_requests", "Generations that ended, by outcome.", ("outcome",), registry=registry
        )
        self.running_requests = Gauge(
            "outrider_running_requests", "Generations that are running or queued.", registry=registry
        )
        self.unread_answers = unread_answers(registry)
        self.prompt_tokens = Counter("outrider_prompt_tokens", "Prompt tokens.", registry=registry)
        self.tally = Tally()
        registry.register(self.tally)
        self.first_token = histogram(
            "time_to_first_token_seconds", "Time from request to first token, in seconds.", _SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Time between commits divided by their tokens, in seconds.", _SECONDS
        )
        self.duration = histogram("request_duration_seconds", "Time from request to its end, in seconds.", _SECONDS)
        self.accept_length = histogram(
            "request_accept_length", "Tokens per step of a request, bonus token included.", _LENGTHS
        )
        self.services = ServiceMetrics(registry)
        self.traffic = Traffic()
        registry.register(TrafficCollector(self.traffic))

    def count(
        self, session: Session, tokens: int, verified: int, accepted: int, now: float, together: int, source: int = 0
    ) -> None:
        """Count a commit: one step, or several plain steps. now: by the clock of time.perf_counter.

        together: tokens of the session in the same frame, its own included; 0 for a further commit of that frame
        source: SourceKind of the verified draft tokens
        """
        tally, stats, steps = self.tally, session.stats, 1 if verified else tokens
        if stats.steps:
            if together:
                self.inter_token.observe((now - stats.committed_at) / together)
            if verified:
                tally.steps_with_draft += 1
            else:
                tally.steps_without_draft += steps
        else:
            self.first_token.observe(now - stats.opened_at)
            stats.first_at = now
        tally.steps += steps
        tally.tokens += tokens
        tally.verified += verified
        tally.accepted += accepted
        if verified:
            tally.drafts[min(accepted, MAX_POSITIONS)] += 1
            add_counts(tally.sources, source, verified, accepted)
        stats.committed_at = now

    def render(self) -> bytes:
        """The page that Prometheus reads."""
        self.services.loads.clear()
        self.before_render()
        return generate_latest(self.registry)
