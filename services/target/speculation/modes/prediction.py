"""Predicts steps of one mode from those of another, and how much a trial's throughput varies by chance."""

from __future__ import annotations

from services.target.speculation.estimates.answer_latency import AnswerLatency
from services.target.speculation.estimates.in_time import share_in_time
from services.target.speculation.modes.mode import DRAFT_MODES, SpeculationMode
from services.target.speculation.modes.trial import TRIAL, Steps

# Steps with proposals for which it counts that they accept one draft token, and steps without from which own sources
# are predicted: the first few may meet a hard line of text.
PRIOR_STEPS = 4.0
_RUNS = 1.5  # variance of what steps commit, over that of independent ones: chains are accepted in runs
_PACE_NOISE = 0.03  # standard deviation of a trial's throughput by the machine's pace
_OWN_WALK = 0.2  # the same of its level since the last one, where all tokens are those of own sources: texts change


def predicted(mode: SpeculationMode, steps: Steps, accepted: float, latency: AnswerLatency) -> Steps | None:
    """A few steps of a mode, from those of another one with drafts; None if it cannot be predicted from them.

    Drafting beside the target is taken to cost it nothing. accepted: draft tokens of a step with proposals
    latency: of a draft's answers
    """
    if not steps.steps:
        return None
    others = steps.steps - steps.drafted
    step, own = (steps.seconds - steps.held) / steps.steps, steps.own / max(others, 1.0)
    drafted = held = 0.0
    if mode is SpeculationMode.SELF_SPECULATE:
        if others < PRIOR_STEPS:
            return None
        step = (steps.seconds - steps.held - steps.drafted_seconds) / others
    elif mode in DRAFT_MODES:
        if not latency.count:
            return None
        shares = _shares(accepted, step, latency)
        waits = mode is SpeculationMode.WAIT_FOR_DRAFT
        drafted, held = max(shares, key=lambda one: (1.0 + one[0] * accepted) / (step + one[1])) if waits else shares[0]
    own *= 1.0 - drafted
    tokens = 1.0 + own + drafted * accepted
    made = Steps()
    made.add(Steps(tokens, step + held, 1.0, own, drafted, drafted * accepted, held, drafted * step), scale=PRIOR_STEPS)
    return made


def _shares(accepted: float, step: float, latency: AnswerLatency) -> list[tuple[float, float]]:
    """Share of sessions' steps with draft tokens, and seconds of waiting: if steps wait for none, and if they wait for
    the nearest ones, more and more, to all of them."""
    links = sorted(latency.links, key=lambda one: one.held_seconds)
    late = [share_in_time(accepted, step, one.seconds) for one in links]
    total = sum(late)
    made = [(total / len(links), 0.0)]
    for one, share in zip(links, late, strict=True):
        total += 1.0 - share
        made.append((total / len(links), one.held_seconds))
    return made


def variances(count: float, usual: Steps, accepted: float, sessions: float) -> tuple[float, float]:
    """Of the logarithm of the throughput of a trial of `count` steps: by chance, and by texts that change in between.

    The text decides how much own sources gain, and which steps have proposals. usual: steps of the mode
    accepted: draft tokens of a step with proposals, which are taken to be as many in all trials
    """
    steps = max(usual.steps, 1.0)
    each = max(usual.tokens / steps, 1.0)
    own, drafted = usual.own / steps / each, min(usual.drafted / steps, 1.0)
    chance = _RUNS * (own**2 + (accepted / each) ** 2 * drafted * (1.0 - drafted)) / sessions
    return (_PACE_NOISE**2 * TRIAL + chance) / count, (_OWN_WALK * own) ** 2 / sessions
