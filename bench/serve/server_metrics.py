"""Speculation figures from a server's /metrics page: the difference of its counters before and after a load.

- vLLM's names, also used by other servers: <prefix>spec_decode_num_{drafts,draft_tokens,accepted_tokens}_total and
  _num_accepted_tokens_per_pos_total{position}.
- Outrider's: outrider_{verification_steps,generated_tokens,verified_draft_tokens,accepted_draft_tokens}_total.
- SGLang's: sglang:spec_verify_calls_total and sglang:generation_tokens_total; without these counters, its gauges of
  the last interval.

Counters include the requests of other clients. A counter that decreased means that the server restarted: no figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from bench.serve.metrics import Speculation

# By name and label `position` ("" without it); summed over all other labels, such as engines and replicas.
Counters = Mapping[tuple[str, str], float]

_VLLM = "spec_decode_num_"


def read(page: str | None) -> Counters:
    """The samples of a page in Prometheus' text format; empty for any other page."""
    found: dict[tuple[str, str], float] = {}
    try:
        for family in text_string_to_metric_families(page or ""):
            for sample in family.samples:
                key = (sample.name, sample.labels.get("position", ""))
                found[key] = found.get(key, 0.0) + sample.value
    except ValueError:
        return {}
    return found


def speculation(before: Counters, after: Counters) -> Speculation | None:
    """Speculation between two readings; None if the server exports no such metric, or verified no draft tokens."""
    grown = {key: value - before.get(key, 0.0) for key, value in after.items()}
    return _vllm(grown) or _outrider(grown) or _sglang(grown, after)


def _vllm(grown: Counters) -> Speculation | None:
    def total(what: str) -> float:
        return sum(value for (name, _), value in grown.items() if name.endswith(f"{_VLLM}{what}_total"))

    drafts, drafted, accepted = (total(what) for what in ("drafts", "draft_tokens", "accepted_tokens"))
    if drafts <= 0 or min(drafted, accepted) < 0:
        return None
    per_position: dict[int, float] = {}
    for (name, position), value in grown.items():
        if name.endswith(f"{_VLLM}accepted_tokens_per_pos_total") and position.isdigit():
            per_position[int(position)] = per_position.get(int(position), 0.0) + value
    shares = tuple(per_position[p] / drafts for p in sorted(per_position))
    rate = accepted / drafted if drafted else None
    return Speculation(1 + accepted / drafts, rate, shares, "/metrics; of steps that had a draft")


def _outrider(grown: Counters) -> Speculation | None:
    names = ("verification_steps", "generated_tokens", "verified_draft_tokens", "accepted_draft_tokens")
    steps, tokens, drafted, accepted = (grown.get((f"outrider_{name}_total", ""), 0.0) for name in names)
    if min(steps, drafted) <= 0 or min(tokens, accepted) < 0:
        return None
    return Speculation(tokens / steps, accepted / drafted, source="/metrics")


def _sglang(grown: Counters, after: Counters) -> Speculation | None:
    calls = grown.get(("sglang:spec_verify_calls_total", ""))
    tokens = grown.get(("sglang:generation_tokens_total", ""), 0.0)
    if tokens < 0 or (calls is not None and calls <= 0):
        return None  # the gauges still hold values of an earlier load
    rate = after.get(("sglang:spec_accept_rate", ""))
    if calls and tokens:
        return Speculation(tokens / calls, rate, source="/metrics; the rate is of the last interval")
    length = after.get(("sglang:spec_accept_length", ""))
    return Speculation(length, rate, source="/metrics, of the last interval") if length else None
