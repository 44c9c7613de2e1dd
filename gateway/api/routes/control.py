"""Routes that control the targets, under SGLang's names, for administrators: by key, or over the control socket.

With several models, a call names the one that it is for in the query: `?model=NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query
from pydantic import BaseModel
from starlette.responses import Response

from gateway.admission.admission import Keys
from gateway.admission.caller import CALLER
from gateway.api.answers.json_response import json_response
from gateway.api.requests.http import VALID_UNICODE
from gateway.api.routes import weights
from gateway.control.control import PauseMode
from gateway.control.models import Models, Serving
from gateway.control.worker_answers import abort_everywhere
from outrider.errors import InvalidRequest

_PREFIX = re.compile("^(chatcmpl-|cmpl-|resp_)")  # of answer ids, before the request id


class PauseBody(BaseModel):
    """POST /pause_generation."""

    mode: PauseMode = "abort"


class MemoryBody(BaseModel):
    """POST /release_memory_occupation and /resume_memory_occupation. tags: null for all that can be released."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class AbortBody(BaseModel):
    """POST /abort_request. rid: id of the request, from its field `rid` or its header X-Request-Id."""

    rid: str | None = None
    prefix: Literal[False] = False  # an earlier option, which must not abort a single request in silence
    abort_all: bool = False
    model: str | None = None  # whose requests are meant; by default those of all models

    def names(self) -> list[str]:
        """Possible request ids: rid, and rid without the prefix of an answer's id. Raises InvalidRequest."""
        names = [name for name in (self.rid, _PREFIX.sub("", self.rid or "")) if name]
        if not names:
            raise InvalidRequest("send `rid`, the id of the request, or `abort_all`", param="rid")
        return list(dict.fromkeys(names))


def install(app: FastAPI, models: Models, keys: Keys) -> None:
    """Add the routes to an app."""

    async def check_admin() -> None:
        keys.check_admin(CALLER.get())

    async def controlled(model: str | None = None) -> Serving:
        return models.controlled(model)

    admin, named = [Depends(check_admin)], Depends(controlled)

    weights.install(app, admin, named)

    @app.get("/flush_cache", dependencies=admin, tags=["control"])
    @app.post("/flush_cache", dependencies=admin, tags=["control"])
    async def flush_cache(
        timeout: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0,  # noqa: ASYNC109
        model: Serving = named,
    ) -> Response:
        await model.control.flush_cache(timeout)
        return json_response({"success": True, "message": "Cache flushed."})

    @app.post("/pause_generation", dependencies=admin, tags=["control"])
    async def pause_generation(body: PauseBody | None = None, model: Serving = named) -> Response:
        mode = body.mode if body is not None else "abort"
        await model.control.pause(mode)
        return json_response({"status": "ok", "message": f"Generation is paused, mode {mode}."})

    @app.post("/continue_generation", dependencies=admin, tags=["control"])
    async def continue_generation(model: Serving = named) -> Response:
        await model.control.resume()
        return json_response({"status": "ok", "message": "Generation continues."})

    _install_memory(app, admin, named)

    @app.post("/abort_request", tags=["control"], dependencies=[VALID_UNICODE])
    async def abort_request(body: AbortBody) -> Response:
        """Abort a request with this id that was sent with the same API key. Clients keep the text so far.

        An administrator may abort the requests of others, and all at once.
        """
        running = [one.running for one in models.chosen(body.model) if one.running is not None]
        if body.abort_all:
            keys.check_admin(CALLER.get())
            aborted = await _abort_all(running)
        else:
            aborted = await _abort_named(running, body.names())
        return json_response({"success": True, "aborted_requests": aborted})

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    async def weight_version(model: Serving = named) -> Response:
        """The label of the weights, whether an update of several parts is open, and the targets that lack weights and
        are unused until they are sent again.
        """
        control = model.control
        return json_response({
            "weight_version": control.weights.version,
            "update_open": control.update_open,
            "awaiting_targets": control.weights.awaiting,
        })  # fmt: skip

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info(model: str | None = None) -> Response:
        serving = models.choose(model)
        facts = serving.facts.target.model
        return json_response({
            "model_path": facts.model_path,
            "tokenizer_path": facts.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": serving.control.weights.version,
            "architecture": facts.architecture,
            "fingerprint": facts.fingerprint,
        })  # fmt: skip


def _install_memory(app: FastAPI, admin: Sequence[Any], named: Any) -> None:
    """Add the routes that release and take back memory. admin, named: dependencies, as of `install`."""

    @app.post("/release_memory_occupation", dependencies=admin, tags=["control"])
    async def release_memory_occupation(body: MemoryBody | None = None, model: Serving = named) -> Response:
        tags = body.tags if body is not None else None
        if tags is not None and "kv_cache" not in tags:
            raise InvalidRequest(
                "weights stay in memory; release `kv_cache`, or stop the target meanwhile", param="tags"
            )
        size = await model.control.release_memory()
        message = f"{size} bytes of KV caches are released; weights stay in memory."
        return json_response({"success": True, "message": message, "released_bytes": size, "kept": ["weights"]})

    @app.post("/resume_memory_occupation", dependencies=admin, tags=["control"])
    async def resume_memory_occupation(body: MemoryBody | None = None, model: Serving = named) -> Response:
        if body is None or body.tags is None or "kv_cache" in body.tags:
            await model.control.resume_memory()
        return json_response({"success": True, "message": "Memory is taken again."})


async def _abort_all(running: Sequence[Serving]) -> int:
    """End all sessions of some models, in all gateway processes. Returns their number."""
    aborted = 0
    for model in running:
        others = await model.facts.peers.ask("abort_all")
        aborted += model.generator.abort_all() + sum(others.values())
    return aborted


async def _abort_named(running: Sequence[Serving], names: Sequence[str]) -> int:
    """End the caller's generations with the first of these ids that has any. Returns their number."""
    for name in names:
        aborted = 0
        for model in running:
            aborted += await abort_everywhere(model.generator, model.facts.peers, name)
        if aborted:
            return aborted
    return 0
