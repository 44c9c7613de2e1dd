"""The page that reckons large pools from the measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.harness.report import Report
from bench.pools.reckoning import UTILIZATION, Costs, Plan, busy, costs_of, frames, reckon

_ROW_BYTES = 8192  # of hidden states of a token: 4096 numbers of 16 bits, behind the fusion
_MB = 1e6
# A hundred targets; one machine and ten for comparison. The groups have gateways of their own.
PLANS = (
    Plan(8, 8, 64, 0.025, 4),
    Plan(100, 100, 16, 0.025, 4),
    Plan(100, 100, 64, 0.025, 4),
    Plan(100, 25, 64, 0.025, 4),
    Plan(100, 100, 64, 0.025, 4, groups=10),
    Plan(100, 100, 64, 0.025, 4, row_bytes=_ROW_BYTES),
    Plan(100, 100, 64, 0.025, 4, row_bytes=_ROW_BYTES, groups=10),
    Plan(100, 100, 256, 0.05, 4, groups=10),
)


def row_of(costs: Costs, plan: Plan) -> dict[str, Any]:
    """A row of the table."""
    found = reckon(costs, plan)
    return {
        "targets": plan.targets, "drafts": plan.drafts, "groups": plan.groups, "sessions a target": plan.sessions,
        "step, ms": 1e3 * plan.step, "features, bytes/token": plan.row_bytes, "tokens/s": f"{plan.rate:,.0f}",
        "target in, MB/s": found.target_in / _MB, "target out, MB/s": found.target_out / _MB,
        "draft in, MB/s": found.draft_in / _MB, "draft out, MB/s": found.draft_out / _MB,
        "gateway processes": found.gateways if found.gateways is not None else "no number is enough",
        "busy": f"{found.busy:.0%}", "a gateway's streams, MB/s": found.gateway / _MB,
        "one stream, MB/s": found.stream / _MB,
    }  # fmt: skip


def check_of(costs: Costs, window: Mapping[str, Any]) -> dict[str, Any]:
    """A row that compares the formulas with a measured window of one gateway."""
    each = window["sessions"] / window["targets"]
    step, draft_step = window["step, ms"] / 1e3, window["draft's step, ms"] / 1e3
    # A window whose commits came later than the engines' steps allow had longer steps.
    step = max(step, window["sessions"] / max(1.0, window["commits/s"]))
    plan = Plan(window["targets"], window["drafts"], each, step, window["accept length"], draft_step=draft_step)
    return {
        "targets": window["targets"], "drafts": window["drafts"], "sessions": window["sessions"],
        "frames/s": f"{window['frames/s']:,.0f}", "reckoned": f"{frames(plan, 1):,.0f}",
        "gateway cores": window["gateway cores"], "reckoned cores": busy(costs, plan, 1),
    }  # fmt: skip


def write_reckoned(measured: Mapping[str, Any]) -> None:
    """Write the page. measured: the figures of docs/benchmarks/pools.json."""
    costs = costs_of(measured["rows"], measured["features"])
    report = Report("pools-reckoned", "A hundred targets, reckoned from measured costs")
    for plan in PLANS:
        report.add(**row_of(costs, plan))
    where = f"`{measured['command']}`, commit {measured['commit']}, {measured['date']}"
    report.notes = [
        f"Computed by bench/pools/reckoning.py from [pools](pools.md) ({where}; {measured['hardware']['cpu']}); "
        "nothing of this size was measured",
        "Costs of a gateway, by least squares over the windows of one gateway: "
        f"{1e6 * costs.frame:.1f} µs of processor time a frame, {1e6 * costs.commit:.1f} µs a commit (a session's part "
        f"of a step, with its proposal and the client's chunk), {1e9 * costs.feature_byte:.2f} ns a byte of hidden "
        f"states. Bytes a commit: {costs.commit_bytes:.0f} from the target, {costs.proposal_bytes:.0f} of proposals",
        f"Gateway processes: the fewest of which each uses at most {UTILIZATION:.0%} of a core of that machine, "
        "prompts and HTTP included as measured",
        "Out: from a replica to all gateways, in: from all gateways to it; proposals go to the target, commits and "
        "hidden states to the draft. A gateway's streams: what it receives, and what it sends",
        "Groups: parts of the pools with gateways of their own. Without them the sessions of a step are spread over "
        "many drafts, and each frame between a gateway and a draft has few of them. Drafts take steps of 5 ms",
    ]
    report.more = [("The formulas on the measured windows", [check_of(costs, row) for row in measured["rows"]])]
    report.write()
