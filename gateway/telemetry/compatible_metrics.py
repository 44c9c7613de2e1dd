"""Metrics under the names of vLLM and SGLang where the meaning is the same, for dashboards made for them."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.metrics import Metrics

_FINISHED_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "error": "error", "overloaded": "error"}


class _CompatibleMetrics(Collector):
    """Our metrics under the names of another server."""

    def __init__(self, metrics: Metrics, prefix: str, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._prefix = prefix
        self._labels = labels

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, "", {"": value})

    def _counters(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        """A counter with a further label; an empty name is no further label."""
        more = (label,) if label else ()
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*self._labels, *more))
        for key, value in values.items():
            family.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=tuple(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _tokens_and_times(self) -> Iterator[Metric]:
        """Metrics that both servers have."""
        metrics = self._metrics
        yield self._counter("prompt_tokens", "Prompt tokens.", _value(metrics.prompt_tokens))
        yield self._counter("generation_tokens", "New tokens.", metrics.tally.tokens)
        for histogram, name in (
            (metrics.first_token, "time_to_first_token_seconds"),
            (metrics.inter_token, "inter_token_latency_seconds"),
            (metrics.duration, "e2e_request_latency_seconds"),
        ):
            yield histogram.family(f"{self._prefix}:{name}", self._labels)

    def _targets(self, field: str) -> int:
        """Sum of a field of the targets' loads."""
        return sum(
            getattr(load, field) for (service, _), load in self._metrics.services.loads.items() if service == "target"
        )

    def _kv_usage(self) -> float:
        """Fraction of the targets' KV pages that sessions lease; 0 before a target has reported."""
        total = self._targets("total_pages")
        return 1.0 - self._targets("free_pages") / total if total else 0.0


class VllmMetrics(_CompatibleMetrics):
    """`vllm:*`. In `spec_decode` a draft is a step that verified draft tokens; a position is a depth from 0 on."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        """model: the served name."""
        super().__init__(metrics, "vllm", {"model_name": model, "engine": "0"})

    def collect(self) -> Iterator[Metric]:
        """The metric families. Positions end with the last one at which a token was accepted."""
        metrics, tally = self._metrics, self._metrics.tally
        yield self._gauge("num_requests_running", "Requests in the batch.", self._targets("running_sessions"))
        yield self._gauge("num_requests_waiting", "Requests in the queue.", self._targets("waiting_sessions"))
        yield self._gauge("kv_cache_usage_perc", "Fraction of the KV cache in use.", self._kv_usage())
        yield self._counter(
            "num_preemptions",
            "Sessions whose pages were taken for other sessions.",
            metrics.services.target_preemptions.total,
        )
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", _value(metrics.prompt_tokens))
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", tally.cached)
        yield from self._tokens_and_times()
        reasons = dict.fromkeys(_FINISHED_REASONS.values(), 0.0)
        for outcome, count in _by_outcome(metrics).items():
            reasons[_FINISHED_REASONS[outcome]] += count
        yield self._counters("request_success", "Requests that ended, by reason.", "finished_reason", reasons)
        for name, text, value in (
            ("drafts", "Steps that verified draft tokens.", sum(tally.drafts)),
            ("draft_tokens", "Draft tokens that were verified.", tally.verified),
            ("accepted_tokens", "Draft tokens that were accepted.", tally.accepted),
        ):
            yield self._counter(f"spec_decode_num_{name}", text, value)
        positions = {str(position): float(count) for position, count in enumerate(tally.accepted_by_position())}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(name, "Draft tokens that were accepted, by position.", "position", positions)


class SglangMetrics(_CompatibleMetrics):
    """`sglang:*`."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        """model: the served name."""
        super().__init__(metrics, "sglang", {"model_name": model})

    def collect(self) -> Iterator[Metric]:
        """The metric families."""
        metrics, tally = self._metrics, self._metrics.tally
        asked, outcomes = _value(metrics.prompt_tokens), _by_outcome(metrics)
        yield self._gauge("num_running_reqs", "Requests in the batch.", self._targets("running_sessions"))
        yield self._gauge("num_queue_reqs", "Requests in the queue.", self._targets("waiting_sessions"))
        yield self._gauge("token_usage", "Fraction of the KV cache in use.", self._kv_usage())
        yield self._gauge(
            "cache_hit_rate",
            "Fraction of prompt tokens found in the prefix cache.",
            tally.cached / asked if asked else 0.0,
        )
        yield self._gauge("spec_accept_length", "Tokens per step, bonus token included.", tally.accept_length)
        yield self._gauge("spec_accept_rate", "Accepted over verified draft tokens.", tally.acceptance_rate)
        yield self._counter("spec_verify_calls", "Steps that verified draft tokens.", sum(tally.drafts))
        yield self._counter("num_requests", "Requests that ended.", sum(outcomes.values()))
        yield self._counter("num_aborted_requests", "Requests that were aborted.", outcomes.get("abort", 0.0))
        yield from self._tokens_and_times()


def _value(counter: Collector) -> float:
    """Value of a counter without labels."""
    return next(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))


def _by_outcome(metrics: Metrics) -> dict[str, float]:
    """Requests that ended, by outcome."""
    samples = (sample for metric in metrics.requests.collect() for sample in metric.samples)
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}
