"""Metrics of all workers on one page: any worker returns the samples of all, each labelled with its worker.

Sums over workers are left to the reader, as for replicas: a worker that restarts begins at 0, which Prometheus handles
for a series of its own but not for a sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.telemetry.metrics import Metrics
from gateway.workers.peers import Peers


async def collect(metrics: Metrics, peers: Peers) -> bytes:
    """The page of this worker and of the others; for a gateway in one process, its own page unchanged."""
    own = metrics.render()
    if not peers.several:
        return own
    others = await peers.ask("metrics")
    return merge({peers.index: own.decode(), **others}, peers.count).encode()


def merge(pages: Mapping[int, str], count: int) -> str:
    """Pages in Prometheus' text format, by worker, as one page. count: number of workers, absent ones included."""
    families: dict[str, list[str]] = {}  # samples, by the HELP and TYPE comments before them
    for worker, page in sorted(pages.items()):
        label, comment = f'worker="{worker}"', ""
        for line in page.splitlines():
            if line.startswith("# HELP"):
                comment = line
            elif line.startswith("# TYPE"):
                samples = families.setdefault(f"{comment}\n{line}", [])
            elif not line.startswith("#"):
                samples.append(_labelled(line, label))
    lines = [
        "# HELP outrider_worker_up 1 if a worker of the gateway answers.",
        "# TYPE outrider_worker_up gauge",
        *(f'outrider_worker_up{{worker="{worker}"}} {float(worker in pages)}' for worker in range(count)),
    ]
    for comments, samples in families.items():
        lines += [comments, *samples]
    return "\n".join(lines) + "\n"


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
