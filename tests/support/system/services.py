"""Real engines behind their real servicers, in threads of the test, so that the test can inspect them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outrider.config import TargetConfig
from outrider.serving.loop import EngineLoop
from outrider.transport.rpc import GrpcServer
from outrider.transport.stream import StreamHub
from outrider.wire import codec
from services.draft.drafters.base import Drafter
from services.draft.engine.engine import DraftEngine
from services.draft.process.app import describe as describe_draft
from services.draft.process.service import DraftServicer
from services.draft.sessions.frontier import TreeLimits
from services.target.process.app import build_engine
from services.target.process.control import Control
from services.target.process.service import TargetServicer, describe


@dataclass
class Service:
    """An engine behind its real servicer, in a thread.

    pause: seconds of rest after each step with output, so that its answer arrives before the next step
    """

    build: Callable[[], Any]  # returns the engine, its coders, and what registers its servicer
    address: str
    ready: threading.Event = field(default_factory=threading.Event)
    pause: float = 0.0

    def start(self):
        self.ready.clear()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.thread.start()
        assert self.ready.wait(60)
        return self

    def stop(self):
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.end.set)
            self.thread.join(20)

    async def _serve(self):
        self.loop, self.end = asyncio.get_running_loop(), asyncio.Event()
        engine_loop = EngineLoop(lambda _: None)
        self.engine, coders, register = self.build()
        hub = StreamHub(engine_loop, *coders)
        server = GrpcServer()
        await server.start(self.address, register(server, hub, engine_loop, self.engine))
        await hub.acceptor.open(self.address)

        def publish(output):
            rest = self.pause * output.steps  # the reader of the output may change the pause
            hub.publish(output)
            time.sleep(rest)

        engine_loop.start(self.engine, publish)
        await server.set_serving(True)
        self.ready.set()
        await self.end.wait()
        hub.close()
        await hub.acceptor.close()
        await server.stop(0)
        await asyncio.to_thread(engine_loop.stop)
        assert engine_loop.fault is None


def target_service(folder, address, **flags):
    config = TargetConfig(**({"device": "cpu", "max_total_tokens": 4096} | flags))

    def register(server, hub, loop, engine):
        servicer = TargetServicer(hub, loop)
        servicer.serve(
            describe(folder, engine, config), engine, Control(engine, folder, roots=config.weight_update_roots)
        )
        return servicer.register(server)

    coders = (codec.verify_request_from_pb, codec.verify_response_to_pb)
    return Service(lambda: (build_engine(folder, config), coders, register), address)


def draft_service(address, drafter):
    """drafter: a drafter, or a function that returns a new one at every start."""

    def register(server, hub, loop, engine):
        servicer = DraftServicer(hub, loop)
        servicer.serve(describe_draft(engine, None), engine)
        return servicer.register(server)

    def build():
        made = drafter if isinstance(drafter, Drafter) else drafter()
        return DraftEngine(made, TreeLimits(), 16), coders, register

    coders = (codec.propose_request_from_pb, codec.propose_response_to_pb)
    return Service(build, address)
