"""Routes that list, add and remove replicas, under the names of SGLang's router, for administrators.

SGLang's router calls a replica a worker. Its present routes are `/workers` and `/workers/ID`, its former ones
`/add_worker`, `/remove_worker` and `/list_workers`. They are open before the first target is up, so that a gateway may
start with empty pools.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from gateway.admission.admission import Keys
from gateway.admission.caller import CALLER
from gateway.api.answers.json_response import json_response
from gateway.api.requests.http import VALID_UNICODE, Route
from gateway.control.models import Models, ServedModel
from gateway.control.replicas import COMING
from gateway.pools.members import Service
from gateway.streams.availability import ReplicaState
from outrider.errors import InvalidRequest, NotFound

PATHS = ("/workers", "/add_worker", "/remove_worker", "/list_workers")

# SGLang's worker types; all our targets are regular ones.
_SERVICES = {"target": Service.TARGET, "regular": Service.TARGET, "draft": Service.DRAFT}


class WorkerBody(BaseModel):
    """POST /workers. url: the replica's address, with or without grpc:// in front. model_id: in whose pools it is."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    url: str = Field(min_length=1)
    worker_type: str = "target"
    model_id: str | None = None


def install(app: FastAPI, models: Models, keys: Keys) -> None:
    """Add the routes to an app."""

    async def check_admin() -> None:
        keys.check_admin(CALLER.get())

    def shown(model: ServedModel, one: dict[str, Any]) -> dict[str, Any]:
        """A replica with SGLang's fields beside ours. With several models its model_id is the name of its model."""
        return _worker(one, model.name if models.several else one["model"])

    router = APIRouter(route_class=Route, dependencies=[Depends(check_admin)], tags=["control"])

    @router.get("/workers")
    async def listed(model: str | None = None) -> Response:
        """All replicas of both pools, with their state, sessions and load, and what names them. model: of it alone."""
        found = [shown(*one) for one in await models.replicas(model)]
        used = [one["service"] for one in found if one["state"] != COMING]
        counts = {service: used.count(service) for service in Service}
        stats = {"regular_count": counts[Service.TARGET], "draft_count": counts[Service.DRAFT]}
        return json_response({
            "workers": found,
            "total": len(found),
            "stats": {**stats, "prefill_count": 0, "decode_count": 0},
            "failed_sources": [
                one | ({"model_id": of.name} if models.several else {})
                for of in models.chosen(model)
                for one in of.replicas.failed_sources
            ],
        })  # fmt: skip

    @router.post("/workers", dependencies=[VALID_UNICODE])
    async def add(body: WorkerBody) -> Response:
        """Add a replica. It is used once it is up and fits the others; GET /workers shows its state."""
        service = _service(body.worker_type)
        # A single model ignores the name, because routers give their own.
        pools = models.named(body.model_id, "model_id") if models.several else models.default
        found, _ = await pools.replicas.add(service, body.url)
        location = f"/workers/{found}"
        message = "The replica is used once it is up and fits."
        if pools.replicas.next is not None:
            message += " The changed table of its model, which holds once a target of it is up, has it as well."
        content = {
            "status": "accepted", "worker_id": found, "url": body.url, "location": location,
            "message": message,
        }  # fmt: skip
        return json_response(content, 202, {"location": location})

    @router.get("/workers/{worker:path}")
    async def one(worker: str, model: str | None = None) -> Response:
        """One replica, by its id or its address."""
        return json_response(shown(*await models.replica(worker, model)))

    @router.delete("/workers/{worker:path}")
    async def remove(worker: str, drain: bool = True, model: str | None = None) -> Response:
        """Remove a replica, by its id or its address. With drain its sessions leave first; otherwise it leaves at
        once.
        """
        pools, _ = await models.replica(worker, model)
        found = await pools.replicas.remove(worker, drain=drain)
        message = "Its sessions go on elsewhere." if drain else "It has left its pool."
        return json_response({"status": "accepted", "worker_id": found["id"], "message": message}, 202)

    _install_former(router, models)

    @router.get("/list_workers")
    async def list_workers(model: str | None = None) -> Response:
        """The addresses of all targets."""
        found = [one for _, one in await models.replicas(model) if one["state"] != COMING]
        return json_response({"urls": [_url(one) for one in found if one["service"] == Service.TARGET]})

    app.include_router(router)


def _service(worker_type: str) -> Service:
    if worker_type not in _SERVICES:
        raise InvalidRequest(
            f"`worker_type` {worker_type!r} is not served here; send target or draft", param="worker_type"
        )
    return _SERVICES[worker_type]


def _worker(one: dict[str, Any], model_id: str | None) -> dict[str, Any]:
    return {
        "id": one["id"],
        "url": _url(one),
        "model_id": model_id,
        "worker_type": "regular" if one["service"] == Service.TARGET else "draft",
        "is_healthy": one["state"] == ReplicaState.READY,
        "load": one["sessions"],
        "connection_mode": "grpc",
        **one,
    }


def _url(one: dict[str, Any]) -> str:
    address: str = one["address"]
    return address if address.startswith("unix:") else f"grpc://{address}"


def _install_former(router: APIRouter, models: Models) -> None:
    """Add the routes by which SGLang's router was sent replicas before."""

    @router.post("/add_worker", response_class=PlainTextResponse)
    async def add_worker(
        url: Annotated[str, Query(min_length=1)], worker_type: str = "target", model: str | None = None
    ) -> Response:
        await models.named(model).replicas.add(_service(worker_type), url)
        return PlainTextResponse(f"Successfully added worker: {url}")

    @router.post("/remove_worker", response_class=PlainTextResponse)
    async def remove_worker(
        url: Annotated[str, Query(min_length=1)], drain: bool = True, model: str | None = None
    ) -> Response:
        try:
            pools, _ = await models.replica(url, model)
            await pools.replicas.remove(url, drain=drain)
        except NotFound as error:  # SGLang's status
            raise InvalidRequest(error.message, param="url") from None
        return PlainTextResponse(f"Successfully removed worker: {url}")
