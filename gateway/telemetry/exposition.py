"""Metrics of all models and workers on one page: any worker returns the samples of all, labelled with model and worker.

Sums over workers are left to the reader, as for replicas: a worker that restarts begins at 0, which Prometheus handles
for a series of its own but not for a sum. With one model, samples have no label of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from gateway.workers.peers import Peers


async def collect(page: Callable[[], str], peers: Peers) -> bytes:
    """The page of this worker and of the others; for a gateway in one process, its own page unchanged.

    page: makes this worker's
    """
    own = page()
    if not peers.several:
        return own.encode()
    others = await peers.ask("metrics")
    return merge({peers.index: own, **others}, peers.count).encode()


def merge(pages: Mapping[int, str], count: int) -> str:
    """Pages in Prometheus' text format, by worker, as one page. count: number of workers, absent ones included."""
    lines = [
        "# HELP outrider_worker_up 1 if a worker of the gateway answers.",
        "# TYPE outrider_worker_up gauge",
        *(f'outrider_worker_up{{worker="{worker}"}} {float(worker in pages)}' for worker in range(count)),
    ]
    return "\n".join(lines) + "\n" + labelled("worker", {str(worker): page for worker, page in sorted(pages.items())})


def labelled(label: str, pages: Mapping[str, str]) -> str:
    """Pages as one, each with its key as the value of a label of all its samples."""
    families: dict[str, list[str]] = {}  # samples, by the HELP and TYPE comments before them
    for key, page in pages.items():
        value, comment = f"{label}={json.dumps(key, ensure_ascii=False)}", ""
        for line in page.splitlines():
            if line.startswith("# HELP"):
                comment = line
            elif line.startswith("# TYPE"):
                samples = families.setdefault(f"{comment}\n{line}", [])
            elif not line.startswith("#"):
                samples.append(_labelled(line, value))
    return "".join("\n".join([comments, *samples]) + "\n" for comments, samples in families.items())


def _labelled(sample: str, label: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
