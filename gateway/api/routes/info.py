"""Routes with facts about the model, the gateway and its metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from gateway.api.answers.json_response import json_response
from gateway.control.server_info import Facts
from gateway.orchestration.generator import Generator
from gateway.telemetry import exposition


def install(app: FastAPI, generator: Generator, facts: Facts) -> None:
    """Add the routes to an app."""
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(generator, name, started) for name in generator.names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        # A name may be a path; routers on the way may have removed its first slash.
        known = {one.strip("/"): one for one in ("default", *generator.names)}
        found = known.get(name.strip("/"))
        if found is None:
            raise generator.not_found(name)
        return json_response(_model(generator, generator.answered_as(found), started))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics of all workers."""
        page = await exposition.collect(generator.metrics, facts.peers)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        return json_response(facts.server_info(generator))

    @app.get("/v1/loads")
    async def loads() -> Response:
        """Requests in progress, of all workers and targets, as one engine."""
        others = await facts.peers.ask("running")
        total = generator.admission.running + sum(others.values())
        loads = [target.load for target in generator.orchestrator.targets if target.up and target.load is not None]
        running = min(total, sum(load.running_sessions for load in loads))
        counts = {"num_running_reqs": running, "num_waiting_reqs": total - running, "num_total_reqs": total}
        return json_response({"dp_rank_count": 1, "loads": [{"dp_rank": 0, **counts}]})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": facts.version})


def _model(generator: Generator, name: str, created: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": generator.max_session_tokens,
    }
