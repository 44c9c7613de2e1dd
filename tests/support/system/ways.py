"""Which files a request, a proposal and a commit pass: call stacks of a small system where each of them is handed on.

A stack begins where the thing arrives: at what reads it, or at the engine's loop. What converts or stores it and
returns, as codec and inbox do, is not on the stack of the next.

`python -m tests.support.system.ways FOLDER` serves a model's folder, and writes the ways as JSON: by name a list of
stacks, each a list of "file:function", the first caller first. One process holds gateway, draft service and target.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
from functools import partial, reduce
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[3]
PACKAGES = ("outrider", "gateway", "services")

# Functions that receive what is on its way, in the order in which it comes to them.
POINTS = {
    "request": (
        "gateway.process.connections:BoundedHttp.on_headers_complete",
        "gateway.streams.target:TargetLink.open",
        "gateway.streams.target:TargetLink.take_frame",
        "outrider.serving.loop:EngineLoop.submit",
        "services.target.engine.sessions:OpenSessions.open",
        "services.target.kernels.cpu.programs.program:Program.run",
    ),
    "proposal": (
        "services.draft.sessions.outbox:ProposalOutbox.take",
        "outrider.transport.call_streams:CallWriter.send",
        "gateway.streams.target:TargetLink.propose",
        "gateway.streams.target:TargetLink.take_frame",
        "outrider.serving.loop:EngineLoop.submit",
        "outrider.speculation.tree:SpeculationTree.merge",
        "services.target.speculation.sources.draft_service:DraftService.draft",
        "services.target.step.batch:build",
    ),
    "commit": (
        "services.target.engine.settlement:Settlement.settle",
        "outrider.transport.call_streams:CallWriter.send",
        "gateway.sessions.session:Session.commit",
        "gateway.orchestration.generation:Generation.next",
        "uvicorn.protocols.http.httptools_impl:RequestResponseCycle.send",
    ),
}

READS = "FrameStream.read"  # what waits for it, the attempts to hold the connection, hands nothing on


def code_of(name: str) -> CodeType:
    """The code of a function, by its module and its name there."""
    module, _, path = name.partition(":")
    function: Any = reduce(getattr, path.split("."), importlib.import_module(module))
    return inspect.unwrap(function).__code__


class Trace:
    """Notes the first stack at each point while it is on. Threads are seen that start after it."""

    def __init__(self) -> None:
        self.on = False
        self.stacks: dict[str, list[str]] = {}
        self._points = {code_of(name): name for name in {name for names in POINTS.values() for name in names}}
        sys.setprofile(self._called)
        threading.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and self.on and (name := self._points.get(frame.f_code)) is not None:
            self.stacks.setdefault(name, _stack(frame))

    def ways(self) -> dict[str, list[list[str]]]:
        """The stacks of each way. Raises KeyError for a point that was not reached."""
        return {way: [self.stacks[name] for name in names] for way, names in POINTS.items()}


def _stack(frame: FrameType | None) -> list[str]:
    stack = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES:
            stack.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}")
        frame = None if frame.f_code.co_qualname == READS else frame.f_back
    return stack[::-1]


def files_of(way: list[list[str]]) -> list[str]:
    """The different files on a way, in order."""
    return list(dict.fromkeys(place.partition(":")[0] for stack in way for place in stack))


def returns_of(way: list[list[str]]) -> list[str]:
    """Functions that are called from another file although one of their file waits for that: turns back."""
    found = []
    for stack in way:
        files = [place.partition(":")[0] for place in stack]
        found += [place for i, place in enumerate(stack) if i and files[i - 1] != files[i] and files[i] in files[:i]]
    return found


def main(folder: str) -> None:
    """Serve, send a request twice, and write the ways of the second, whose text the drafter knows."""
    trace = Trace()
    import httpx

    from gateway.process.app import serve
    from outrider.config import GatewayConfig, parse_flags
    from services.draft.drafters.ngram import NgramDrafter
    from services.draft.ngrams.base import NgramOptions
    from tests.support.gateway.services import free_port, until
    from tests.support.system.services import draft_service, target_service

    with tempfile.TemporaryDirectory() as base:
        target = target_service(Path(folder), f"unix:{base}/target", speculative_always=True).start()
        draft = draft_service(f"unix:{base}/draft", NgramDrafter(NgramOptions())).start()
        port = free_port()
        flags = ["--target", target.address, "--draft", draft.address, "--port", port, "--grpc-port", free_port()]
        config = parse_flags(GatewayConfig, [*map(str, flags), "--disable-draft-self-test"], "gateway")

        def ask() -> None:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                until(partial(_healthy, client))
                for trace.on in (False, True):
                    body = {"messages": [{"role": "user", "content": "again"}], "max_tokens": 60, "temperature": 0}
                    client.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status()
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask, daemon=True).start()
        try:
            assert asyncio.run(serve(config)) == 0
        finally:
            for service in (target, draft):
                service.stop()
    print(json.dumps(trace.ways()))


def _healthy(client: Any) -> bool:
    import httpx

    try:
        return client.get("/health").json()["status"] == "ok"
    except httpx.TransportError:
        return False


if __name__ == "__main__":
    main(sys.argv[1])
