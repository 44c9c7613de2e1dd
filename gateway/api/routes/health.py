"""Health routes: liveness, readiness, the full state, and a generated token."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.responses import Response

from gateway.control.health import Health
from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest, StopOptions
from outrider.errors import OutriderError
from outrider.speculation.sampling import SamplingParams

_PROBE_SECONDS = 20.0  # for the token of a probe


def install(app: FastAPI, generator: Generator, health: Health) -> None:
    """Add the routes to an app. They require no key."""

    @app.get("/health", tags=["health"])
    async def full() -> Response:
        """The full state: 200 if requests can be served, otherwise 503; the body has the state of every service."""
        return _json(health.state(), not health.ready)

    @app.get("/health/live", tags=["health"])
    @app.get("/live", tags=["health"], include_in_schema=False)
    async def live() -> Response:
        """200 while the process answers."""
        return _json({"status": "ok"}, False)

    @app.get("/health/ready", tags=["health"])
    @app.get("/ready", tags=["health"], include_in_schema=False)
    async def ready() -> Response:
        """200 if requests can be served, with or without a draft; otherwise 503."""
        return _json({"status": "ok" if health.ready else "unavailable"}, not health.ready)

    @app.get("/health_generate", tags=["health"])
    async def health_generate() -> Response:
        """200 after a target has generated a token for this call; otherwise 503 with the reason."""
        sessions = generator.orchestrator.sessions
        reason = f"no token came within {_PROBE_SECONDS:.0f} s"
        try:
            sampling = SamplingParams(temperature=0.0)
            session = sessions.open(GenerationRequest([0], sampling, StopOptions(1), max_draft_tokens=0, counted=False))
            try:
                async with asyncio.timeout(_PROBE_SECONDS):
                    if (await session.inbox.next()).tokens:
                        return _json({"status": "ok"}, False)
                    reason = "the probe was aborted"
            finally:
                sessions.close(session)
        except OutriderError as error:
            reason = error.message
        except TimeoutError:
            pass
        return _json({"status": "unavailable", "missing": [reason]}, True)


def _json(content: Any, unavailable: bool) -> Response:
    return Response(orjson.dumps(content), status_code=503 if unavailable else 200, media_type="application/json")
