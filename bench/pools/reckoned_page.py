"""The page that reckons large pools from the measured figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.harness.report import Report
from bench.pools.reckoning import UTILIZATION, Costs, Plan, busy, costs_of, frames, reckon

_ROW_BYTES = 8192  # of hidden states of a token: 4096 numbers of 16 bits, behind the fusion
_KB = 1e3
# A hundred targets; one machine and ten for comparison. The groups have gateways of their own.
PLANS = (
    Plan(8, 8, 64, 0.025, 4),
    Plan(100, 100, 16, 0.025, 4),
    Plan(100, 100, 64, 0.025, 4),
    Plan(100, 25, 64, 0.025, 4),
    Plan(100, 100, 64, 0.025, 4, groups=10),
    Plan(100, 100, 64, 0.025, 4, groups=25),
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
        "target in, kB/s": found.target_in / _KB, "target out, kB/s": found.target_out / _KB,
        "draft in, kB/s": found.draft_in / _KB, "draft out, kB/s": found.draft_out / _KB,
        "gateways, merged": _number(found.fewest), "gateways, spread": _number(found.most),
        "a gateway's streams, kB/s": found.gateway / _KB,
        "one stream, kB/s": found.stream / _KB,
    }  # fmt: skip


def _number(gateways: int | None) -> int | str:
    return gateways if gateways is not None else "no number is enough"


def check_of(costs: Costs, window: Mapping[str, Any]) -> dict[str, Any]:
    """A row that compares the formulas with a measured window of one gateway."""
    each = window["sessions"] / window["targets"]
    step, draft_step = window["step, ms"] / 1e3, window["draft's step, ms"] / 1e3
    # A window whose commits came later than the engines' steps allow had longer steps.
    step = max(step, window["sessions"] / max(1.0, window["commits/s"]))
    plan = Plan(window["targets"], window["drafts"], each, step, window["accept length"], draft_step=draft_step)
    return {
        "targets": window["targets"], "drafts": window["drafts"], "sessions": window["sessions"],
        "frames/s": f"{window['frames/s']:,.0f}",
        "merged": f"{frames(plan, 1, merged=True):,.0f}", "spread": f"{frames(plan, 1, merged=False):,.0f}",
        "gateway cores": window["gateway cores"], "merged, cores": busy(costs, plan, 1, merged=True),
        "spread, cores": busy(costs, plan, 1, merged=False),
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
        f"Gateways: the processes of which each uses at most {UTILIZATION:.0%} of a core of that machine, prompts and "
        "HTTP included as measured. Spread: a step costs a frame for each draft of its sessions; merged: busy streams "
        "carry one frame in each direction for a step. The second table shows that measured numbers of frames lie "
        "between, nearer to merged the busier the gateway is",
        "Out: from a replica to all gateways, in: from all gateways to it; proposals go to the target, commits and "
        "hidden states to the draft. A gateway's streams: what each of the fewest gateways receives, and what it sends",
        "Groups: parts of the pools with gateways of their own, so that fewer gateways share a target. Drafts "
        "take steps of 5 ms",
    ]
    report.more = [("The formulas on the measured windows", [check_of(costs, row) for row in measured["rows"]])]
    report.write()
