"""Errors as OpenAI-style clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from outrider.errors import OutriderError

log = logging.getLogger(__name__)

_KINDS = {
    400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large",
    415: "unsupported_media_type",
}  # fmt: skip


class ErrorDetails(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


# What any route may answer, for the OpenAPI page.
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    401: {"model": ErrorBody, "description": "The key is missing or wrong."},
    404: {"model": ErrorBody, "description": "There is no such route or model."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The body is not said to be JSON."},
    429: {"model": ErrorBody, "description": "Too many requests of this key are under way; see `Retry-After`."},
    503: {"model": ErrorBody, "description": "No room or no target at present; `Retry-After` says when to come back."},
    504: {"model": ErrorBody, "description": "The time that the request gave is over."},
}


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body of an error. What it quotes of the request may be no Unicode."""
    return orjson.dumps(
        {"error": {"message": _told(message), "type": kind, "param": param and _told(param), "code": code}}
    )


def body_of(error: OutriderError) -> bytes:
    """The JSON body of one of our errors."""
    return error_body(error.message, error.status.kind, error.status.code, error.param)


def response_to(error: OutriderError) -> Response:
    """The response for one of our errors. Overload and absence invite a retry, other server errors do not."""
    headers = {}
    if error.status.http in (429, 503):
        headers["retry-after"] = str(error.retry_after or 1)
    elif error.status.http == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status.http >= 500:
        headers["x-should-retry"] = "false"
    return _json(error.status.http, body_of(error), headers)


def describe(app: FastAPI) -> None:
    """Leave the framework's own errors out of the OpenAPI page: ours stand in their place."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        page = made()
        for route in page["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]


def install(app: FastAPI) -> None:
    """Give an app these error bodies for everything that goes wrong."""

    @app.exception_handler(OutriderError)
    async def ours(_: Request, error: Exception) -> Response:
        assert isinstance(error, OutriderError)
        return response_to(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        status, body = _of_validation(error)
        return _json(status, body)

    @app.exception_handler(RecursionError)
    async def deep(request: Request, error: Exception) -> Response:
        # Tools, schemas and arguments are walked, and said as JSON, by functions that call themselves.
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.warning("%s %s: %s, in %s", request.method, request.url.path, error, where.name)
        return _json(
            400, error_body("values of the body are nested too deep", "invalid_request_error", "invalid_value")
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400:  # that of a body which could not be parsed, and does not say why
            message = (
                "the body cannot be read as JSON; is it UTF-8, with numbers of a sensible length, and not too deep?"
            )
        body = error_body(message, "invalid_request_error", _KINDS.get(error.status_code))
        return _json(error.status_code, body, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = error_body("the gateway failed; see its log", "server_error", "internal_error")
        # The server closes the connection behind it, and who did not know would send the next request there.
        return _json(500, body, {"x-should-retry": "false", "connection": "close"})


def _told(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _of_validation(error: RequestValidationError) -> tuple[int, bytes]:
    """Status and body for what is wrong with a request's form."""
    first: dict[str, Any] = dict(error.errors()[0])
    if first["type"] == "json_invalid":
        message = f"the body is no valid JSON: {first.get('ctx', {}).get('error', '')}"
        return 400, error_body(message, "invalid_request_error", _KINDS[400])
    if first["loc"] == ("body",):
        return _of_body(first)
    meant = _meant([dict(one) for one in error.errors()])
    param, message = ".".join(_place(meant)) or None, str(meant["msg"])
    return 400, error_body(f"{param}: {message}" if param else message, "invalid_request_error", "invalid_value", param)


def _of_body(error: dict[str, Any]) -> tuple[int, bytes]:
    """For a body that is no object. One that is not said to be JSON has come as it is."""
    if isinstance(error.get("input"), bytes):
        message = "send the body as JSON, with the header `Content-Type: application/json`"
        return 415, error_body(message, "invalid_request_error", _KINDS[415])
    message = (
        "the body is missing; send a JSON object" if error["type"] == "missing" else "the body must be a JSON object"
    )
    return 400, error_body(message, "invalid_request_error", "invalid_value")


def _meant(errors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first error; of a field that may be one thing or another the deepest, for that is of the one that was meant.

    Where several of them are as deep it is the first again.
    """
    place = _place(errors[0])
    of_field = [error for error in errors if _place(error)[: len(place)] == place]
    depth = max(len(_place(error)) for error in of_field)
    deepest = [error for error in of_field if len(_place(error)) == depth]
    members = {tuple(part for part in error["loc"] if str(part) not in _place(error)) for error in deepest}
    return deepest[0] if len(members) == 1 else errors[0]


def _place(error: dict[str, Any]) -> list[str]:
    """The field as the caller knows it, such as messages, 0, role: without the union's members that pydantic names."""
    members = ("str", "int", "float", "bool", "TextPart", "InputItem")
    place = [str(part) for part in error["loc"][1:]]  # behind body or query
    return [part for part in place if "[" not in part and part not in members]
