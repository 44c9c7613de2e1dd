"""The report beside a trained draft: training.json with settings, curve and evaluation, and curves.png."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Curve:
    """Points of the training curve. steps, losses: a point every few steps, losses by unroll step.

    seen: accept length of draft chains on held-out answers as (step, greedy, sampled), along the recorded text
    """

    steps: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    seen: list[tuple[int, float, float]] = field(default_factory=list)


def write(folder: Path, settings: dict[str, Any], facts: dict[str, Any], curve: Curve) -> None:
    """Write training.json, and curves.png if Matplotlib is installed."""
    content = {"settings": settings, **facts, "curve": asdict(curve)}
    (folder / "training.json").write_text(json.dumps(content, indent=1) + "\n")
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return
    mpl.use("Agg")
    _plot(folder / "curves.png", curve)


def _plot(path: Path, curve: Curve) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for ahead, losses in enumerate(zip(*curve.losses, strict=True), start=1):
        left.plot(curve.steps, losses, linewidth=1, label=f"{ahead}")
    left.set(xlabel="step", ylabel="cross entropy", title="by tokens ahead")
    left.legend(fontsize="small")
    for place, name in ((1, "temperature 0"), (2, "sampled")):
        right.plot([point[0] for point in curve.seen], [point[place] for point in curve.seen], label=name)
    right.set(xlabel="step", ylabel="tokens", title="accept length of chains, held-out answers")
    right.legend(fontsize="small")
    figure.savefig(path, dpi=110)
