"""The tree of errors, and its two maps: to gRPC status codes and to HTTP.

OutriderError
├── InvalidRequest        the request is wrong; a retry does not help
│   ├── ModelNotFound     no model of that name is served
│   ├── NotFound          nothing of that name exists
│   └── ContextTooLong    prompt and answer do not fit into the context
├── Unauthenticated       the caller's key is missing or wrong
├── Forbidden             the caller may not do this, whatever its key
├── Overloaded            no room at present; the caller may retry later
├── TooManyRequests       the caller has too many requests in progress; it may retry later
├── Conflict              another call of this kind is in progress; the caller may retry once it has ended
├── Unavailable           a needed service is down; the caller may retry later
├── DeadlineExceeded      the caller's deadline has passed
├── ConfigError           flags, files or services that do not fit; refused at start-up
└── EngineFault           a bug or a broken device; the session is lost, the others go on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import grpc


@dataclass(frozen=True)
class Status:
    """An error on gRPC and HTTP. kind: `type` of an OpenAI error body. code: `code` of that body."""

    grpc: grpc.StatusCode
    http: int
    kind: str
    code: str | None


class OutriderError(Exception):
    """Base of all errors that a user may see.

    message: what is wrong and what to do. param: name of the wrong field of the request, or None.
    """

    status: ClassVar[Status] = Status(grpc.StatusCode.INTERNAL, 500, "server_error", "internal_error")

    def __init__(self, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        """retry_after: seconds after which a retry may succeed."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(OutriderError):
    """The request is wrong; a retry does not help."""

    status = Status(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", None)


class ModelNotFound(InvalidRequest):
    """No model of that name is served."""

    status = Status(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "model_not_found")


class NotFound(InvalidRequest):
    """Nothing of that name exists."""

    status = Status(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "not_found")


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit into the context."""

    status = Status(grpc.StatusCode.OUT_OF_RANGE, 400, "invalid_request_error", "context_length_exceeded")


class Unauthenticated(OutriderError):
    """The caller's key is missing or wrong."""

    status = Status(grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_request_error", "invalid_api_key")


class Forbidden(OutriderError):
    """The caller may not do this, whatever its key."""

    status = Status(grpc.StatusCode.PERMISSION_DENIED, 403, "invalid_request_error", "permission_denied")


class TooManyRequests(OutriderError):
    """The caller has too many requests in progress; it may retry later."""

    status = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded")


class Overloaded(OutriderError):
    """No room at present; the caller may retry later."""

    status = Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error", "overloaded")


class Conflict(OutriderError):
    """Another call of this kind is in progress; the caller may retry once it has ended."""

    status = Status(grpc.StatusCode.ABORTED, 409, "invalid_request_error", "conflict")


class Unavailable(OutriderError):
    """A needed service is down; the caller may retry later."""

    status = Status(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "unavailable")


class DeadlineExceeded(OutriderError):
    """The caller's deadline has passed."""

    status = Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded")


class ConfigError(OutriderError):
    """Flags, files or services that do not fit; refused at start-up."""

    status = Status(grpc.StatusCode.FAILED_PRECONDITION, 500, "server_error", "misconfigured")


class EngineFault(OutriderError):
    """A bug or a broken device; the session is lost, the others go on."""


_BY_GRPC_CODE: dict[int, type[OutriderError]] = {
    error.status.grpc.value[0]: error
    for error in (
        InvalidRequest,
        ModelNotFound,
        ContextTooLong,
        Unauthenticated,
        Forbidden,
        Overloaded,
        Conflict,
        Unavailable,
        DeadlineExceeded,
        ConfigError,
        EngineFault,
    )
}


def grpc_code(error: OutriderError) -> int:
    """Number of the error's gRPC status code, as in `SessionError.code`."""
    return int(error.status.grpc.value[0])


def from_grpc_code(code: int, message: str) -> OutriderError:
    """The error for a gRPC status number from a peer; unknown numbers become EngineFault."""
    return _BY_GRPC_CODE.get(code, EngineFault)(message)
