"""What the time of a step consists of, from the recordings of both services, and the timeline of some steps.

The parts overlap, because the draft service works while the target's device does: only the target's device and its
idle time add up to the step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from bench.gpu.system.recording import Rows

_START, _END = 0, 1
# Lanes of the timeline, from above, and their colors.
_LANES = {
    "target's device": "tab:blue", "target's host": "lightsteelblue", "draft's host": "navajowhite",
    "draft's device": "tab:orange",
}  # fmt: skip


class Split(NamedTuple):
    """Milliseconds of a step of the target, by part; draft tokens that it verified.

    period: from step to step. target, idle: its device computes, and does not. target_host: its engine's steps without
    waiting for the device. draft, draft_host: the drafter's programs without their dispatch, and the rest of its
    engine's steps, per step of the target. wire: a commit's way to the draft and a proposal's way back, through the
    gateway, without waiting for the receiver's own step
    """

    period: float
    target: float
    idle: float
    target_host: float
    draft: float
    draft_host: float
    wire: float | None
    verified: float


def split_of(start: float, end: float, target: Rows, draft: Rows, *, on_cuda: bool) -> Split | None:
    """The split of the steps that were launched in a window of time; None if there are none."""
    launches = _inside(target["launch"], start, end)
    count = len(launches)
    if not count:
        return None
    period = (end - start) / count
    device = _seconds(_device_bars(target), start, end) / count
    waiting = target["read" if on_cuda else "launch"]  # on a CPU the device is the host, and computes in the launch
    target_host = _seconds(target["step"], start, end) - _seconds(waiting, start, end)
    computing = _seconds(_program_bars(draft), start, end)
    hops = [
        _hop(sender[kind], receiver, kind, start, end)
        for sender, receiver, kind in ((target, draft, "commits"), (draft, target, "proposals"))
    ]
    return Split(
        1e3 * period,
        1e3 * device,
        1e3 * max(period - device, 0.0),
        1e3 * target_host / count,
        1e3 * computing / count,
        1e3 * (_seconds(draft["step"], start, end) - computing) / count,
        None if None in hops else 1e3 * sum(hop for hop in hops if hop is not None),
        float(launches[:, 4].sum()) / count,
    )


def _inside(rows: NDArray[np.float64], start: float, end: float) -> NDArray[np.float64]:
    """Rows that begin in a window."""
    return rows[(rows[:, _START] >= start) & (rows[:, _START] < end)]


def _seconds(bars: NDArray[np.float64], start: float, end: float) -> float:
    """How much of a window of time the bars fill; of those that reach beyond it, the part inside."""
    return float(np.maximum(np.minimum(bars[:, _END], end) - np.maximum(bars[:, _START], start), 0.0).sum())


def _hop(sent: NDArray[np.float64], receiver: Rows, kind: str, start: float, end: float) -> float | None:
    """Median seconds from sending to receiving, of the messages that the receiver was ready for; None without any."""
    arrivals = {key: at for at, key in receiver[kind].tolist()}
    ends = receiver["step"][:, _END]
    seconds = []
    for at, key in _inside(sent, start, end).tolist():
        if (arrived := arrivals.get(key)) is None or arrived < at:
            continue
        last = int(np.searchsorted(ends, arrived, side="right")) - 1
        seconds.append(arrived - max(at, ends[last] if last >= 0 else at))
    return float(np.median(seconds)) if seconds else None


def draw(axes: Axes, start: float, end: float, target: Rows, draft: Rows, *, steps: int = 4) -> None:
    """Draw the timeline of some steps in the middle of a window: bars of both services, arrows of frames between."""
    launches = _inside(target["launch"], start, end)
    middle = launches[max(len(launches) // 2 - steps // 2, 0) :][: steps + 1]
    if not len(middle):
        return
    first, last = middle[0, _START], middle[-1, _START]
    lanes = [_device_bars(target), target["step"], draft["step"], _program_bars(draft)]
    for lane, (bars, color) in enumerate(zip(lanes, _LANES.values(), strict=True)):
        shown = bars[(bars[:, _END] > first) & (bars[:, _START] < last)]
        spans = [(1e3 * (bar[_START] - first), 1e3 * (bar[_END] - bar[_START])) for bar in shown]
        axes.broken_barh(spans, (lane - 0.35, 0.7), color=color)
    for sender, receiver, kind, lane in ((target, draft, "commits", 1), (draft, target, "proposals", 2)):
        arrivals = {key: at for at, key in receiver[kind].tolist()}
        for at, key in _inside(sender[kind], first, last).tolist():
            if (arrived := arrivals.get(key, 0.0)) >= at:
                head, tail = (1e3 * (arrived - first), 3 - lane), (1e3 * (at - first), lane)
                axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "color": "dimgray", "lw": 0.8})
    axes.set(yticks=range(len(_LANES)), yticklabels=list(_LANES), xlabel="ms", xlim=(0, 1e3 * max(last - first, 1e-6)))
    axes.invert_yaxis()


def _device_bars(target: Rows) -> NDArray[np.float64]:
    """When the target's device computes."""
    return target["launch"][:, 2:4]


def _program_bars(draft: Rows) -> NDArray[np.float64]:
    runs = draft["run"]
    return np.stack([runs[:, _START] + runs[:, 2], runs[:, _END]], axis=1)
