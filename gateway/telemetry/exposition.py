"""One page of metrics of several workers: whichever is asked tells those of all, each sample with its worker.

Sums over workers are left to the reader, as they are for replicas: a worker that starts again begins at 0, which
Prometheus understands of a series of its own, and would not of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.telemetry.metrics import Metrics
from gateway.workers.peers import Peers


async def collect(metrics: Metrics, peers: Peers) -> bytes:
    """The page of this worker and of the others; of a gateway in one process, its own as it is."""
    own = metrics.render()
    if not peers.several:
        return own
    others = await peers.ask("metrics")
    return merge({peers.index: own.decode(), **others}, peers.count).encode()


def merge(pages: Mapping[int, str], count: int) -> str:
    """Pages in Prometheus' text format, by worker, as one. count: of the workers, those that are away included."""
    families: dict[str, list[str]] = {}  # samples, by the comments before them: HELP, and TYPE behind it
    for worker, page in sorted(pages.items()):
        label, told = f'worker="{worker}"', ""
        for line in page.splitlines():
            if line.startswith("# HELP"):
                told = line
            elif line.startswith("# TYPE"):
                samples = families.setdefault(f"{told}\n{line}", [])
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
