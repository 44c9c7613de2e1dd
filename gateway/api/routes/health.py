"""Health routes: liveness, readiness, the full state, and a generated token."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from gateway.api.answers.json_response import json_response
from gateway.control.health import UNAVAILABLE
from gateway.control.models import Models, ServedModel
from gateway.sessions.request import GenerationRequest, StopOptions
from outrider.errors import OutriderError
from outrider.speculation.sampling import SamplingParams

_PROBE_SECONDS = 20.0  # for the token of a probe
_PROBE_AGE = 5.0  # seconds for which a probe's result is the answer to further calls


class Probe:
    """Generates a token to see whether a target of a model can. One for all callers, because they need no key."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
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
        try:
            sessions = self._model.serving.generator.orchestrator.sessions
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


def install(app: FastAPI, models: Models) -> None:
    """Add the routes to an app. They require no key. Each may be asked for one of several models."""
    probes: dict[ServedModel, Probe] = {}

    @app.get("/health", tags=["health"])
    async def full(model: str | None = None) -> Response:
        """The full state: 200 if requests can be served, otherwise 503; the body has the state of every service."""
        one = models.named(model) if model else models
        return json_response(one.state(), _status(one.ready))

    @app.get("/health/live", tags=["health"])
    @app.get("/live", tags=["health"], include_in_schema=False)
    @app.get("/liveness", tags=["health"], include_in_schema=False)
    async def live() -> Response:
        """200 while the process answers."""
        return json_response({"status": "ok"})

    @app.get("/health/ready", tags=["health"])
    @app.get("/ready", tags=["health"], include_in_schema=False)
    @app.get("/readiness", tags=["health"], include_in_schema=False)
    async def ready(model: str | None = None) -> Response:
        """200 if requests can be served, with or without a draft; otherwise 503. Of several models one is enough; the
        body has the state of each.
        """
        one = models.named(model) if model else models
        body: dict[str, Any] = {"status": "ok" if one.ready else UNAVAILABLE}
        if isinstance(one, Models) and models.several:
            body["models"] = {each.name: "ok" if each.ready else UNAVAILABLE for each in models}
        return json_response(body, _status(one.ready))

    @app.get("/health_generate", tags=["health"])
    async def health_generate(model: str | None = None) -> Response:
        """200 if a target has generated a token in the last seconds, for this call or another; otherwise 503. Of
        several models one is enough.
        """
        asked = models.chosen(model)
        for gone in probes.keys() - set(models):
            del probes[gone]
        found = await asyncio.gather(*(probes.setdefault(one, Probe(one)).failure() for one in asked))
        several = len(asked) > 1
        missing = [f"{one.name}: {why}" if several else why for one, why in zip(asked, found, strict=True) if why]
        works = len(missing) < len(asked)
        body: dict[str, Any] = {"status": "ok" if works else UNAVAILABLE}
        return json_response(body | ({"missing": missing} if missing else {}), _status(works))


def _status(ready: bool) -> int:
    return 200 if ready else 503
