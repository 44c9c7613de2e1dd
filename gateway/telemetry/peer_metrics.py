"""Metrics under the names of vLLM and SGLang, where they mean the same, so that their dashboards can read ours."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.metrics import Metrics

_ENDS = {"stop": "stop", "length": "length", "abort": "abort", "error": "error", "overloaded": "error"}


class _Peer(Collector):
    """One of our registries under another server's names."""

    def __init__(self, metrics: Metrics, prefix: str, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._prefix = prefix
        self._labels = labels

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._counters(name, text, "", {"": value})

    def _counters(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        """A counter with a further label, or with none if that is empty."""
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
        """What both have."""
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
        """Sum of a number that targets tell of themselves."""
        return sum(getattr(load, field) for (service, _), load in self._metrics.loads.items() if service == "target")

    def _used(self) -> float:
        """Part of the targets' KV pages that sessions hold; 0 before a target has told."""
        total = self._targets("total_pages")
        return 1.0 - self._targets("free_pages") / total if total else 0.0


class Vllm(_Peer):
    """`vllm:*`. In `spec_decode` a draft is a step that verified a node; a position is a depth, the first is 0."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        """model: the served name."""
        super().__init__(metrics, "vllm", {"model_name": model, "engine": "0"})

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it. Positions are told as far as any was accepted."""
        metrics, tally = self._metrics, self._metrics.tally
        yield self._gauge("num_requests_running", "Requests in the batch.", self._targets("running_sessions"))
        yield self._gauge("num_requests_waiting", "Requests that wait.", self._targets("waiting_sessions"))
        yield self._gauge("kv_cache_usage_perc", "Part of the KV cache in use, 1 is all.", self._used())
        yield self._counter("num_preemptions", "Sessions that gave way to others.", metrics.target_preemptions.total)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", _value(metrics.prompt_tokens))
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", tally.cached)
        yield from self._tokens_and_times()
        ends = dict.fromkeys(_ENDS.values(), 0.0)
        for outcome, count in _by_outcome(metrics).items():
            ends[_ENDS[outcome]] += count
        yield self._counters("request_success", "Requests that ended, by how.", "finished_reason", ends)
        for name, text, value in (
            ("drafts", "Steps that verified draft tokens.", sum(tally.drafts)),
            ("draft_tokens", "Draft tokens that were verified.", tally.verified),
            ("accepted_tokens", "Draft tokens that were accepted.", tally.accepted),
        ):
            yield self._counter(f"spec_decode_num_{name}", text, value)
        places = {str(place): float(count) for place, count in enumerate(tally.reached())}
        name = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(name, "Draft tokens that were accepted, by position.", "position", places)


class Sglang(_Peer):
    """`sglang:*`."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        """model: the served name."""
        super().__init__(metrics, "sglang", {"model_name": model})

    def collect(self) -> Iterator[Metric]:
        """As Prometheus reads it."""
        metrics, tally = self._metrics, self._metrics.tally
        asked, outcomes = _value(metrics.prompt_tokens), _by_outcome(metrics)
        yield self._gauge("num_running_reqs", "Requests in the batch.", self._targets("running_sessions"))
        yield self._gauge("num_queue_reqs", "Requests that wait.", self._targets("waiting_sessions"))
        yield self._gauge("token_usage", "Part of the KV cache in use, 1 is all.", self._used())
        yield self._gauge(
            "cache_hit_rate", "Part of the prompts found in the prefix cache.", tally.cached / asked if asked else 0.0
        )
        yield self._gauge("spec_accept_length", "Tokens per step, bonus included.", tally.accept_length)
        yield self._gauge("spec_accept_rate", "Accepted over verified draft tokens.", tally.acceptance_rate)
        yield self._counter("spec_verify_calls", "Steps that verified draft tokens.", sum(tally.drafts))
        yield self._counter("num_requests", "Requests that ended.", sum(outcomes.values()))
        yield self._counter("num_aborted_requests", "Requests that were aborted.", outcomes.get("abort", 0.0))
        yield from self._tokens_and_times()


def _value(counter: Collector) -> float:
    """Of a counter without labels."""
    return next(s.value for metric in counter.collect() for s in metric.samples if s.name.endswith("_total"))


def _by_outcome(metrics: Metrics) -> dict[str, float]:
    """Requests that ended, by how."""
    samples = (sample for metric in metrics.requests.collect() for sample in metric.samples)
    return {sample.labels["outcome"]: sample.value for sample in samples if sample.name.endswith("_total")}
