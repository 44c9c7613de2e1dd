"""Routes that change the weights of all targets, under SGLang's names, for administrators.

Tensors come as a safetensors file in the body, with options in the query, or as SGLang's clients send them: JSON with
pickles in base64, which the targets decode without calling what they name. A trainer may also broadcast them over a
process group that the targets join.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from gateway.api.answers.json_response import json_response
from gateway.api.requests.http import VALID_UNICODE
from gateway.api.requests.weights import (
    BeginBody,
    DiskBody,
    DistributedBody,
    GroupBody,
    JoinBody,
    LabelBody,
    UpdateBody,
    parts_of,
    tensor_body,
)
from gateway.control.models import Serving
from gateway.control.weight_updates import UpdateResult

_SAFETENSORS = "application/octet-stream"


def install(app: FastAPI, admin: Sequence[Any], named: Any) -> None:
    """Add the routes to an app. admin: dependencies that let only administrators pass. named: the model of a call."""

    @app.post("/update_weights_from_disk", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def update_weights_from_disk(body: DiskBody, model: Serving = named) -> Response:
        return _updated(await model.control.weights.update_from_disk(body.model_path, body.update()))

    @app.post("/update_weights_from_tensor", dependencies=admin, tags=["control"])
    async def update_weights_from_tensor(request: Request, model: Serving = named) -> Response:
        """As a safetensors file: options are query parameters. As JSON: they are fields."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == _SAFETENSORS:
            options = _options(request)
            return _updated(await model.control.weights.update_from_tensors(parts_of(request), options.update()))
        body = await tensor_body(request, model.control.weights.max_update_bytes)
        return _updated(
            await model.control.weights.update_from_tensors(body.pickle(), body.pickled_update(), pickled=True)
        )

    @app.post("/begin_weight_update", dependencies=admin, tags=["control"])
    async def begin_weight_update(
        body: BeginBody | None = None,  # noqa: ARG001 - its values mean the same
        model: Serving = named,
    ) -> Response:
        """Open an update of several parts. Parts sent without it take effect one by one."""
        await model.control.begin_update()
        return json_response({"success": True, "message": "Generation is paused until POST /end_weight_update."})

    @app.post("/end_weight_update", dependencies=admin, tags=["control"])
    async def end_weight_update(model: Serving = named) -> Response:
        await model.control.end_update()
        version = model.control.weights.version
        return json_response({"success": True, "message": f"The update has ended; weight version {version}."})

    @app.post("/update_weight_version", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def update_weight_version(body: LabelBody, model: Serving = named) -> Response:
        result = await model.control.weights.label(body.new_version, abort_all_requests=body.abort_all_requests)
        version = result.weights.weight_version
        return json_response({"success": True, "message": f"Weight version is {version}.", "new_version": version})

    @app.post("/init_weights_update_group", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def init_weights_update_group(body: JoinBody, model: Serving = named) -> Response:
        await model.control.weights.join_group(body.request())
        return json_response({"success": True, "message": f"All targets have joined the group {body.group_name}."})

    @app.post("/destroy_weights_update_group", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def destroy_weights_update_group(body: GroupBody, model: Serving = named) -> Response:
        await model.control.weights.leave_group(body.group_name)
        return json_response({"success": True, "message": f"All targets have left the group {body.group_name}."})

    @app.post("/update_weights_from_distributed", dependencies=[*admin, VALID_UNICODE], tags=["control"])
    async def update_weights_from_distributed(body: DistributedBody, model: Serving = named) -> Response:
        return _updated(await model.control.weights.update_from_group(body.request()))


def _options(request: Request) -> UpdateBody:
    try:
        return UpdateBody.model_validate(dict(request.query_params))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("query", *one["loc"])} for one in errors]) from None


def _updated(updated: UpdateResult) -> Response:
    weights = updated.weights
    message = f"{weights.replaced_tensors} tensors replaced; weight version {weights.weight_version}."
    if updated.unused:
        message += (
            f" {len(updated.unused)} of {updated.targets} targets lack earlier weights, or cannot be reached, and are "
            "unused until they have all of them; see `unused_targets`, and /health for the reasons."
        )
    return json_response({
        "success": True,
        "message": message,
        "num_paused_requests": weights.retracted_sessions,
        "num_aborted_requests": weights.aborted_sessions,
        "weight_version": weights.weight_version,
        "unused_targets": updated.unused,
    })  # fmt: skip
