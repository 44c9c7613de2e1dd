"""A minimal relay between a target and a draft service: it forwards frames and has no texts and no clients.

The overhead of the gateway is its time beyond the relay's. `python -m bench.streams.relay TARGET DRAFT SESSIONS STEPS
TRANSPORT` prints the seconds of STEPS steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
import uvloop

from bench.harness.processes import output_of
from gateway.streams.connection import Connection
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.config import StreamTransport
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire.opens import open_to_pb

_STARTUP_TIMEOUT = 60.0  # seconds


def relayed(addresses: dict[str, str], sessions: int, steps: int, transport: StreamTransport = "grpc") -> float:
    """Seconds of `steps` steps of the simulated services, relayed by a separate process as with the gateway."""
    arguments = [addresses["target"], addresses["draft"], str(sessions), str(steps), transport]
    command = [sys.executable, "-m", "bench.streams.relay", *arguments]
    return float(output_of(command))


async def _relay(
    target_address: str, draft_address: str, sessions: int, steps: int, transport: StreamTransport
) -> float:
    connection = Connection(transport=transport)
    target = TargetLink(target_address, connection)
    target.start()
    await target.wait_up(_STARTUP_TIMEOUT)
    assert target.info is not None, "a connected link has the service's info"
    draft = DraftLink(draft_address, target.info.model, connection)
    draft.start()
    await draft.wait_up(_STARTUP_TIMEOUT)
    left, done = steps, asyncio.Event()

    async def from_target(frame: Any) -> None:
        nonlocal left
        if frame.commits.session_ids:
            draft.commit(frame.commits)
            left -= 1
            if left == 0:
                done.set()

    async def from_draft(frame: Any) -> None:
        if frame.proposals.session_ids:
            target.propose(frame.proposals)

    target.stream.on_frame, draft.stream.on_frame = from_target, from_draft
    for index in range(sessions):
        tokens = np.array([index, index + 1], np.uint32)
        stop = StopConditions(max_tokens=2 * steps, ignore_eos=True)
        request = open_to_pb(OpenSession(index + 1, tokens, len(tokens), SamplingParams(0.0), stop))
        target.open(request)
        draft.open(request)
    start = time.perf_counter()
    await done.wait()
    seconds = time.perf_counter() - start
    await target.stop()
    await draft.stop()
    return seconds


if __name__ == "__main__":
    arguments: Any = (*sys.argv[1:3], *map(int, sys.argv[3:5]), sys.argv[5])
    print(uvloop.run(_relay(*arguments)))
