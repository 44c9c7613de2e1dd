"""From measured costs to a plan of large pools: bytes per second of each link, and the gateways that are needed.

A gateway's processor time is divided into two parts by least squares over the measured windows: what a frame costs, and
what a commit of a session costs. Frames of one step are as many as its sessions are spread over drafts:

    target ──1──► gateway ──E──► drafts        E: different drafts of the sessions that the gateway has on the target
    target ◄──E── gateway ◄──e── drafts        e: as many, or fewer where a draft's step answers several targets' steps

E is one where there are no more drafts than targets, because a gateway opens sessions of a draft on the same
targets. That is the most. A gateway whose streams are busy merges what is for the same replica, down to one frame in
each direction for a step; measured numbers lie between. Both bounds are reckoned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UTILIZATION = 0.7  # share of a core that a gateway process is planned to use
MAX_GATEWAYS = 2000
_DEPENDENT = 1e-9  # of a determinant, relative: frames and commits are in proportion in all windows


@dataclass(frozen=True)
class Costs:
    """What was measured of a gateway.

    frame, commit: its processor seconds for a frame that it sends or receives, and for a commit, which is a session's
    part of a step, with the proposal for it and the client's chunk. feature_byte: for a byte of hidden states.
    commit_bytes, proposal_bytes: of a session's part of a step, on one link
    """

    frame: float
    commit: float
    feature_byte: float = 0.0
    commit_bytes: float = 0.0
    proposal_bytes: float = 0.0


@dataclass(frozen=True)
class Plan:
    """Pools to reckon.

    sessions: running ones of each target. step, draft_step: seconds of an engine's step. accept_length: tokens of a
    commit. row_bytes: hidden states of a token; 0 for a drafter that reads none. groups: parts of the pools, each with
    gateways of its own
    """

    targets: int
    drafts: int
    sessions: float
    step: float
    accept_length: float
    row_bytes: int = 0
    groups: int = 1
    draft_step: float = 0.005

    @property
    def commits(self) -> float:
        """Commits per second of a target."""
        return self.sessions / self.step

    @property
    def rate(self) -> float:
        """Tokens per second of all targets."""
        return self.targets * self.commits * self.accept_length


@dataclass(frozen=True)
class Reckoned:
    """Bytes per second. target_out, draft_out: of a replica to all gateways; target_in, draft_in: from all gateways.
    fewest, most: gateway processes, with frames merged and frames spread; None if no number is enough. gateway: what
    each of the fewest receives, and sends, on all of its streams; stream: the same of one target's
    """

    target_in: float
    target_out: float
    draft_in: float
    draft_out: float
    gateway: float
    stream: float
    fewest: int | None
    most: int | None


def reckon(costs: Costs, plan: Plan, utilization: float = UTILIZATION) -> Reckoned:
    """The traffic of a plan, and the gateway processes that it needs if each uses at most this share of a core."""
    commits, proposals = costs.commit_bytes * plan.commits, costs.proposal_bytes * plan.commits
    features = plan.row_bytes * plan.accept_length * plan.commits
    a_draft = plan.targets / plan.drafts  # targets that each draft drafts for
    counts = range(plan.groups, MAX_GATEWAYS + 1, plan.groups)
    fewest, most = [
        next((n for n in counts if busy(costs, plan, n, merged=merged) <= utilization), None)
        for merged in (True, False)
    ]
    used = fewest or counts[-1]
    of_target = commits + proposals + features
    return Reckoned(
        target_in=proposals,
        target_out=commits + features,
        draft_in=a_draft * (commits + features),
        draft_out=a_draft * proposals,
        gateway=plan.targets * of_target / used,
        stream=of_target * plan.groups / used,
        fewest=fewest,
        most=most,
    )


def busy(costs: Costs, plan: Plan, gateways: int, *, merged: bool) -> float:
    """Share of a core that each gateway uses. gateways: of all groups together. merged: as of `frames`"""
    commits = plan.targets * plan.commits / gateways
    states = plan.accept_length * plan.row_bytes * costs.feature_byte
    return frames(plan, gateways, merged=merged) * costs.frame + commits * (costs.commit + states)


def frames(plan: Plan, gateways: int, *, merged: bool) -> float:
    """Frames per second that each gateway sends and receives. gateways: of all groups together.

    merged: one frame in each direction of a stream for a step; else one for each target and draft that have sessions in
    common
    """
    sessions = plan.sessions * plan.groups / gateways  # that a gateway has on a target
    targets, drafts = plan.targets / plan.groups, plan.drafts / plan.groups
    steps = targets / plan.step
    spread = min(sessions, max(1.0, drafts / targets))  # the gateway gives sessions of a draft to the same targets
    most = steps * (min(1.0, sessions) + 2 * spread) + min(steps * spread, drafts / plan.draft_step)
    if not merged:
        return most
    with_sessions = targets * min(1.0, sessions) + drafts * min(1.0, sessions * targets / drafts)
    return min(most, 2 * with_sessions / plan.step)


def costs_of(windows: Sequence[Mapping[str, Any]], with_features: Sequence[Mapping[str, Any]] = ()) -> Costs:
    """The costs that explain measured windows best, none of them negative.

    windows: each with the gateway's cores, frames/s, commits/s, and bytes/s of commits and proposals on one link.
    with_features: the same of loads with hidden states, with their bytes/s
    """
    frame, commit = _two_costs([(row["frames/s"], row["commits/s"], row["gateway cores"]) for row in windows])
    commits = sum(row["commits/s"] for row in windows) or 1.0
    states = sum(row["feature bytes/s"] for row in with_features)
    others = sum(
        row["gateway cores"] - row["frames/s"] * frame - row["commits/s"] * commit for row in with_features
    )  # fmt: skip
    return Costs(
        frame,
        commit,
        max(0.0, others / states) if states else 0.0,
        sum(row["commit bytes/s"] for row in windows) / commits,
        sum(row["proposal bytes/s"] for row in windows) / commits,
    )


def _two_costs(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares of x * a + y * b = z in relative errors, with a and b at least 0. rows: x, y, z."""
    scaled = [(x / z, y / z) for x, y, z in rows if z > 0]
    xx, yy = sum(x * x for x, _ in scaled), sum(y * y for _, y in scaled)
    xy, x1, y1 = sum(x * y for x, y in scaled), sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if determinant > _DEPENDENT * xx * yy:
        a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
        if a >= 0 and b >= 0:
            return a, b
    alone = [(0.0, y1 / yy if yy else 0.0), (x1 / xx if xx else 0.0, 0.0)]
    return min(alone, key=lambda ab: sum((x * ab[0] + y * ab[1] - 1) ** 2 for x, y in scaled))
