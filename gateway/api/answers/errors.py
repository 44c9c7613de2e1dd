"""Error bodies of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

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

_VALID = "Input should be a valid "  # pydantic's message for a wrong type
_TYPES = {"dictionary": "object"}  # pydantic's names of JSON's types
_KINDS = {
    400: "invalid_json", 404: "not_found", 405: "method_not_allowed", 413: "request_too_large",
    415: "unsupported_media_type",
}  # fmt: skip


class ErrorDetails(BaseModel):
    """One error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetails


# Errors of all routes, for the OpenAPI page.
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "The request is wrong; `param` names the field."},
    401: {"model": ErrorBody, "description": "The key is missing or wrong."},
    403: {"model": ErrorBody, "description": "Closed to this caller, host or origin."},
    404: {"model": ErrorBody, "description": "There is no such route or model."},
    408: {"model": ErrorBody, "description": "The body did not come in time."},
    409: {"model": ErrorBody, "description": "Another call of this kind is in progress."},
    413: {"model": ErrorBody, "description": "The body is too large."},
    415: {"model": ErrorBody, "description": "The content type is not JSON."},
    429: {"model": ErrorBody, "description": "Too many requests of this key are running; see `Retry-After`."},
    503: {"model": ErrorBody, "description": "No room or no target at present; see `Retry-After`."},
    504: {"model": ErrorBody, "description": "The timeout of the request has passed."},
}


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> bytes:
    """The JSON body of an error. Quotes of the request may contain lone surrogates, which are escaped."""
    return orjson.dumps(
        {"error": {"message": _escaped(message), "type": kind, "param": param and _escaped(param), "code": code}}
    )


def body_of(error: OutriderError) -> bytes:
    """The JSON body of an OutriderError."""
    return error_body(error.message, error.status.kind, error.status.code, error.param)


def response_to(error: OutriderError) -> Response:
    """The response for an OutriderError. Overload and absence ask for a retry, other server errors forbid it."""
    headers = {}
    if error.status.http in (429, 503):
        headers["retry-after"] = str(error.retry_after or 1)
    elif error.status.http == 401:
        headers["www-authenticate"] = "Bearer"
    elif error.status.http >= 500:
        headers["x-should-retry"] = "false"
    return _json(error.status.http, body_of(error), headers)


def describe(app: FastAPI) -> None:
    """Remove the framework's errors from the OpenAPI page, where RESPONSES replaces them."""
    make_page = app.openapi

    def openapi() -> dict[str, Any]:
        page = make_page()
        for route in page["paths"].values():
            for operation in route.values():
                operation["responses"].pop("422", None)
        return page

    app.openapi = openapi  # type: ignore[method-assign]


def install(app: FastAPI) -> None:
    """Use these error bodies for all errors of an app."""

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
        # Tools, schemas and arguments are traversed and serialized by recursive functions.
        where = traceback.extract_tb(error.__traceback__)[-1]
        log.warning("%s %s: %s, in %s", request.method, request.url.path, error, where.name)
        return _json(
            400, error_body("values of the body are nested too deep", "invalid_request_error", "invalid_value")
        )

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 400:  # the framework's error for a body that it cannot parse, without a reason
            message = (
                "the body cannot be read as JSON; is it UTF-8, with numbers of a sensible length, and not too deep?"
            )
        body = error_body(message, "invalid_request_error", _KINDS.get(error.status_code))
        return _json(error.status_code, body, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        body = error_body("the gateway failed; see its log", "server_error", "internal_error")
        # The server closes the connection, so the client must not send its next request there.
        return _json(500, body, {"x-should-retry": "false", "connection": "close"})


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _json(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status_code=status, media_type="application/json", headers=headers)


def _of_validation(error: RequestValidationError) -> tuple[int, bytes]:
    """Status and body of a validation error."""
    first: dict[str, Any] = dict(error.errors()[0])
    if first["type"] == "json_invalid":
        message = f"the body is no valid JSON: {first.get('ctx', {}).get('error', '')}"
        return 400, error_body(message, "invalid_request_error", _KINDS[400])
    if first["loc"] == ("body",):
        return _of_body(first)
    path, message = _meant([dict(one) for one in error.errors()])
    param = ".".join(path) or None
    return 400, error_body(f"{param}: {message}" if param else message, "invalid_request_error", "invalid_value", param)


def _of_body(error: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body for a body that is not a JSON object. Without a JSON content type it arrives as bytes."""
    if isinstance(error.get("input"), bytes):
        message = "send the body as JSON, with the header `Content-Type: application/json`"
        return 415, error_body(message, "invalid_request_error", _KINDS[415])
    message = (
        "the body is missing; send a JSON object" if error["type"] == "missing" else "the body must be a JSON object"
    )
    return 400, error_body(message, "invalid_request_error", "invalid_value")


def _meant(errors: Sequence[dict[str, Any]]) -> tuple[list[str], str]:
    """Path and message of the first wrong field.

    Of a field of several types, each has its errors: those count that lie deepest and, in lists, come last, because
    validation of the type that was meant got furthest. If several types got as far, the message names all of them.
    """
    path = _field_path(errors[0])
    of_field = [error for error in errors if _field_path(error)[: len(path)] == path]
    furthest = max(map(_reach, of_field))
    meant = [error for error in of_field if _reach(error) == furthest]
    path = _field_path(meant[0])
    messages = list(dict.fromkeys(str(error["msg"]) for error in meant if _field_path(error) == path))
    if not all(message.startswith(_VALID) for message in messages):
        return path, messages[0]
    names = [message.removeprefix(_VALID).split(" or ")[0] for message in messages]
    *types, last = [_TYPES.get(name, name) for name in names]
    return path, f"{_VALID}{', '.join(types)} or {last}" if types else f"{_VALID}{last}"


def _reach(error: dict[str, Any]) -> tuple[int, list[int]]:
    path = _field_path(error)
    return len(path), [int(part) if part.isdecimal() else -1 for part in path]


def _field_path(error: dict[str, Any]) -> list[str]:
    """Path of a field, such as messages, 0, role, without the union members that pydantic adds."""
    members = ("str", "int", "float", "bool", "TextPart", "InputItem")
    path = [str(part) for part in error["loc"][1:]]  # without "body" or "query"
    return [part for part in path if "[" not in part and part not in members]
