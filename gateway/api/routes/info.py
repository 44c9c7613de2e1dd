"""Routes with facts about the model, the gateway and its metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

import outrider
from gateway.api.answers.json_response import json_response
from gateway.control.models import Models, ServedModel
from gateway.telemetry import exposition


def install(app: FastAPI, models: Models) -> None:
    """Add the routes to an app."""
    started = int(time.time())

    @app.get("/v1/models")
    async def all_models() -> Response:
        data = [_described(model, name, started) for model in models for name in model.names]
        return json_response({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        # A name may be a path; routers on the way may have removed its first slash.
        known = {one.strip("/"): one for one in (models.default.name, *models.names)} | {"default": models.default.name}
        found = known.get(name.strip("/"))
        if found is None:
            raise models.not_found(name)
        return json_response(_described(models.find(found), found, started))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The metrics of all workers."""
        page = await exposition.collect(models.metrics, models.peers)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info(model: str | None = None) -> Response:
        """Flags, services and speculation statistics of a model. With several models and no name in the query: of the
        first one, and of each at `models`.
        """
        if model or not models.several:
            return json_response(_server_info(models.named(model)))
        each = {one.name: _server_info(one) for one in models}
        return json_response(each[models.default.name] | {"models": each})

    @app.get("/v1/loads")
    async def loads(model: str | None = None) -> Response:
        """Requests in progress, of all workers and targets of a model, or of all models, as one engine."""
        total = running = 0
        for serving in (one.running for one in models.chosen(model) if one.running is not None):
            others = await serving.facts.peers.ask("running")
            count = serving.generator.running + sum(others.values())
            links = serving.generator.orchestrator.targets
            reports = [link.load.report for link in links if link.up]
            in_batch = sum(report.running_sessions for report in reports if report is not None)
            total, running = total + count, running + min(count, in_batch)
        counts = {"num_running_reqs": running, "num_waiting_reqs": total - running, "num_total_reqs": total}
        return json_response({"dp_rank_count": 1, "loads": [{"dp_rank": 0, **counts}]})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": outrider.__version__})


def _server_info(model: ServedModel) -> dict[str, Any]:
    """Of a model that is not served yet, the state."""
    serving = model.running
    if serving is None:
        return {"served_model_name": model.name, **model.state()}
    return serving.facts.server_info(serving.generator)


def _described(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    running = model.running
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": running.generator.max_session_tokens if running is not None else None,
    }
