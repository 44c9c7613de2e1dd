"""Prometheus metrics of the gateway, which sees every request and every commit."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from outrider.serving.messages import EngineLoad

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 12, 16)


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"outrider_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
            return Gauge(f"outrider_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"outrider_{name}", text, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Requests that ended, by how.", ("outcome",))
        self.running_requests = gauge("running_requests", "Requests under way.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.")
        self.generated_tokens = counter("generated_tokens", "New tokens that were committed.")
        self.steps = counter("verification_steps", "Commits: steps times the sessions in them.")
        self.proposed = counter("verified_draft_tokens", "Draft nodes that were verified.")
        self.accepted = counter("accepted_draft_tokens", "Draft nodes that were accepted; bonus tokens not counted.")
        self.hits = counter("hint_hits", "Steps of a session that had at least one draft node.")
        self.misses = counter("hint_misses", "Steps of a session that had none although it was drafted for.")
        self.reopened = counter("reopened_sessions", "Sessions opened again after a service went away.", ("service",))
        self.first_token = histogram("time_to_first_token_seconds", "From request to first text.", _SECONDS)
        self.inter_token = histogram("inter_token_latency_seconds", "Time of a commit over its tokens.", _SECONDS)
        self.duration = histogram("request_duration_seconds", "From request to its end.", _SECONDS)
        self.accept_length = histogram(
            "request_accept_length", "Tokens per step of a request, bonus included.", _LENGTHS
        )
        self.mean_accept_length = gauge("accept_length", "Tokens per step, bonus included, since the start.")
        self.acceptance_rate = gauge("acceptance_rate", "Accepted over verified draft nodes, since the start.")
        self.service_up = gauge("service_up", "1 if a service can be used.", ("service", "address"))
        self.sessions = gauge("engine_running_sessions", "Sessions in the engine's batch.", ("service", "address"))
        self.queue = gauge("queue_depth", "Sessions that wait in the engine.", ("service", "address"))
        self.free_pages = gauge("engine_free_pages", "KV pages that are free.", ("service", "address"))
        self.step_seconds = gauge("engine_step_seconds", "Time of the engine's last step.", ("service", "address"))
        self._totals = [0, 0, 0, 0]  # steps, tokens, verified, accepted

    def commits(self, sessions: int, tokens: int, verified: int, accepted: int, hits: int, misses: int) -> None:
        """Count one frame of commits."""
        self.steps.inc(sessions)
        self.generated_tokens.inc(tokens)
        self.proposed.inc(verified)
        self.accepted.inc(accepted)
        self.hits.inc(hits)
        self.misses.inc(misses)
        for i, amount in enumerate((sessions, tokens, verified, accepted)):
            self._totals[i] += amount

    def load(self, service: str, address: str, load: EngineLoad) -> None:
        """Note what an engine says of itself."""
        self.sessions.labels(service, address).set(load.running_sessions)
        self.queue.labels(service, address).set(load.waiting_sessions)
        self.free_pages.labels(service, address).set(load.free_pages)
        self.step_seconds.labels(service, address).set(load.step_microseconds / 1e6)

    @property
    def average_accept_length(self) -> float:
        """Tokens per step since the start; 0 before the first step."""
        return self._totals[1] / self._totals[0] if self._totals[0] else 0.0

    @property
    def average_acceptance_rate(self) -> float:
        """Accepted over verified draft nodes since the start; 0 before the first."""
        return self._totals[3] / self._totals[2] if self._totals[2] else 0.0

    def render(self) -> bytes:
        """The exposition, as Prometheus reads it."""
        self.mean_accept_length.set(self.average_accept_length)
        self.acceptance_rate.set(self.average_acceptance_rate)
        return generate_latest(self.registry)
