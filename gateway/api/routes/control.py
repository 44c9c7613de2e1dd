"""Routes that control the targets, under SGLang's names, for administrators: by their key, or over the control socket.

Unlike in SGLang, tensors are sent as a safetensors file in the body, with options in the query, because unpickling
tensors can run arbitrary code.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import orjson
from fastapi import Depends, FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from gateway.admission.admission import Keys
from gateway.admission.caller import CALLER
from gateway.api.requests.http import VALID_UNICODE
from gateway.control.control import Control, PauseMode, UpdateResult
from gateway.control.server_info import Facts
from gateway.control.worker_answers import abort_everywhere
from gateway.orchestration.generator import Generator
from outrider.errors import InvalidRequest
from outrider.wire.v1 import common_pb2

_PREFIX = re.compile("^(chatcmpl-|cmpl-|resp_)")  # of answer ids, before the request id
_FORMATS = (None, "auto", "safetensors")


class UpdateBody(BaseModel):
    """Options of all update_weights_* routes."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    load_format: str | None = None

    def update(self) -> common_pb2.WeightUpdate:
        """The options as a message. Raises InvalidRequest."""
        if self.load_format not in _FORMATS:
            raise InvalidRequest(
                f"`load_format` {self.load_format} is not supported; leave it out", param="load_format"
            )
        update = common_pb2.WeightUpdate(keep_cache=not self.flush_cache, abort_all_requests=self.abort_all_requests)
        if self.weight_version is not None:
            update.weight_version = self.weight_version
        return update


class DiskBody(UpdateBody):
    """POST /update_weights_from_disk."""

    model_path: str = Field(min_length=1)


class PauseBody(BaseModel):
    """POST /pause_generation."""

    mode: PauseMode = "abort"


class AbortBody(BaseModel):
    """POST /abort_request. rid: id of the request, from its field `rid` or its header X-Request-Id."""

    rid: str | None = None
    prefix: Literal[False] = False  # an earlier option, which must not abort a single request in silence
    abort_all: bool = False

    def names(self) -> list[str]:
        """Possible request ids: rid, and rid without the prefix of an answer's id. Raises InvalidRequest."""
        names = [name for name in (self.rid, _PREFIX.sub("", self.rid or "")) if name]
        if not names:
            raise InvalidRequest("send `rid`, the id of the request, or `abort_all`", param="rid")
        return list(dict.fromkeys(names))


def install(app: FastAPI, control: Control, generator: Generator, facts: Facts, keys: Keys) -> None:
    """Add the routes to an app."""

    async def check_admin() -> None:
        keys.check_admin(CALLER.get())

    admin = [Depends(check_admin)]

    @app.post("/update_weights_from_disk", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def update_weights_from_disk(body: DiskBody) -> Response:
        return _updated(await control.update_from_disk(body.model_path, body.update()))

    @app.post("/update_weights_from_tensor", dependencies=admin, tags=["control"])
    async def update_weights_from_tensor(request: Request, options: Annotated[UpdateBody, Query()]) -> Response:
        return _updated(await control.update_from_tensors(request.stream(), options.update()))

    @app.get("/flush_cache", dependencies=admin, tags=["control"])
    @app.post("/flush_cache", dependencies=admin, tags=["control"])
    async def flush_cache(timeout: Annotated[float, Query(ge=0, allow_inf_nan=False)] = 0.0) -> Response:  # noqa: ASYNC109
        await control.flush_cache(timeout)
        return _json({"success": True, "message": "Cache flushed."})

    @app.post("/pause_generation", dependencies=admin, tags=["control"])
    async def pause_generation(body: PauseBody | None = None) -> Response:
        mode = body.mode if body is not None else "abort"
        await control.pause(mode)
        return _json({"status": "ok", "message": f"Generation is paused, mode {mode}."})

    @app.post("/continue_generation", dependencies=admin, tags=["control"])
    async def continue_generation() -> Response:
        await control.resume()
        return _json({"status": "ok", "message": "Generation continues."})

    @app.post("/abort_request", tags=["control"], dependencies=[VALID_UNICODE])
    async def abort_request(body: AbortBody) -> Response:
        """Abort a request with this id that was sent with the same API key. Clients keep the text so far.

        An administrator may abort the requests of others, and all at once.
        """
        if body.abort_all:
            await check_admin()
            others = await facts.peers.ask("abort_all")
            aborted = generator.abort_all() + sum(others.values())
            return _json({"success": True, "aborted_requests": aborted})
        for name in body.names():
            if aborted := await abort_everywhere(generator, facts.peers, name):
                break
        return _json({"success": True, "aborted_requests": aborted})

    @app.get("/get_weight_version")
    @app.get("/weight_version")
    async def weight_version() -> Response:
        """The label of the weights, and the targets that lack them and are unused until they are sent again."""
        return _json({"weight_version": control.weight_version, "awaiting_targets": control.awaiting})

    @app.get("/get_model_info")
    @app.get("/model_info")
    async def model_info() -> Response:
        model = facts.target.model
        return _json({
            "model_path": model.model_path,
            "tokenizer_path": model.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": control.weight_version,
            "architecture": model.architecture,
            "fingerprint": model.fingerprint,
        })  # fmt: skip


def _updated(updated: UpdateResult) -> Response:
    weights = updated.weights
    message = f"{weights.replaced_tensors} tensors replaced; weight version {weights.weight_version}."
    if updated.unused:
        message += (
            f" {len(updated.unused)} of {updated.targets} targets lack earlier weights, or cannot be reached, and are "
            "unused until they have all of them; see `unused_targets`, and /health for the reasons."
        )
    return _json({
        "success": True,
        "message": message,
        "num_paused_requests": weights.retracted_sessions,
        "num_aborted_requests": weights.aborted_sessions,
        "weight_version": weights.weight_version,
        "unused_targets": updated.unused,
    })  # fmt: skip


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
