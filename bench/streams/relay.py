"""The least that can stand between a target and a draft: it passes frames on, and knows neither texts nor clients.

What the gateway takes longer than this is what it adds. `python -m bench.streams.relay TARGET DRAFT SESSIONS STEPS`
prints the seconds of so many steps.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

import numpy as np
import uvloop

from bench.harness.processes import output_of
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.wire.opens import open_to_pb

_PATIENCE = 60.0  # seconds that services get to answer


def relayed(addresses: dict[str, str], sessions: int, steps: int) -> float:
    """Seconds of so many steps of fake services at these addresses, in a process of its own as the gateway has one."""
    arguments = [addresses["target"], addresses["draft"], str(sessions), str(steps)]
    command = [sys.executable, "-m", "bench.streams.relay", *arguments]
    return float(output_of(command))


async def _relay(target_address: str, draft_address: str, sessions: int, steps: int) -> float:
    target = TargetLink(target_address)
    target.start()
    await target.wait_up(_PATIENCE)
    assert target.info is not None, "a link that is up knows its service"
    draft = DraftLink(draft_address, target.info.model)
    draft.start()
    await draft.wait_up(_PATIENCE)
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

    target.on_frame, draft.on_frame = from_target, from_draft
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
    print(uvloop.run(_relay(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
