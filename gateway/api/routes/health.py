"""Health routes: liveness, readiness, the full state, and a generated token."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.responses import Response

from gateway.api.answers.json_response import json_response
from gateway.control.health import Health
from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest, StopOptions
from outrider.errors import OutriderError
from outrider.speculation.sampling import SamplingParams

_PROBE_SECONDS = 20.0  # for the token of a probe
_PROBE_AGE = 5.0  # seconds for which a probe's result is the answer to further calls


class Probe:
    """Generates a token to see whether a target can. One for all callers, because they need no key."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._running: asyncio.Task[str] | None = None
        self._failure, self._until = "", 0.0  # of the last probe, and when it is too old

    async def failure(self) -> str:
        """Why no token came; empty if one came. At most _PROBE_AGE old."""
        if asyncio.get_running_loop().time() < self._until:
            return self._failure
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await asyncio.shield(self._running)  # a caller that leaves does not end it for the others

    async def _run(self) -> str:
        try:
            self._failure = await self._generate()
        finally:
            self._running = None
        self._until = asyncio.get_running_loop().time() + _PROBE_AGE
        return self._failure

    async def _generate(self) -> str:
        sessions = self._generator.orchestrator.sessions
        try:
            sampling = SamplingParams(temperature=0.0)
            session = sessions.open(GenerationRequest([0], sampling, StopOptions(1), max_draft_tokens=0, counted=False))
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    return "" if (await session.inbox.next()).tokens else "the probe was aborted"
            finally:
                sessions.close(session)
        except OutriderError as error:
            return error.message
        except TimeoutError:
            return f"no token came within {_PROBE_SECONDS:.0f} s"


def install(app: FastAPI, generator: Generator, health: Health) -> None:
    """Add the routes to an app. They require no key."""
    probe = Probe(generator)

    @app.get("/health", tags=["health"])
    async def full() -> Response:
        """The full state: 200 if requests can be served, otherwise 503; the body has the state of every service."""
        return json_response(health.state(), _status(health.ready))

    @app.get("/health/live", tags=["health"])
    @app.get("/live", tags=["health"], include_in_schema=False)
    @app.get("/liveness", tags=["health"], include_in_schema=False)
    async def live() -> Response:
        """200 while the process answers."""
        return json_response({"status": "ok"})

    @app.get("/health/ready", tags=["health"])
    @app.get("/ready", tags=["health"], include_in_schema=False)
    @app.get("/readiness", tags=["health"], include_in_schema=False)
    async def ready() -> Response:
        """200 if requests can be served, with or without a draft; otherwise 503."""
        return json_response({"status": "ok" if health.ready else "unavailable"}, _status(health.ready))

    @app.get("/health_generate", tags=["health"])
    async def health_generate() -> Response:
        """200 if a target has generated a token in the last seconds, for this call or another; otherwise 503."""
        failure = await probe.failure()
        return json_response(
            {"status": "unavailable", "missing": [failure]} if failure else {"status": "ok"}, _status(not failure)
        )


def _status(ready: bool) -> int:
    return 200 if ready else 503
