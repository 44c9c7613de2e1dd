"""Errors as the statuses of gRPC calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar, cast

import grpc

from outrider.errors import OutriderError

Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])

PROGRESS = "outrider-progress"
"""Key of a health check's trailing metadata: progress of the start-up, as text."""


@contextlib.asynccontextmanager
async def statuses(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turn OutriderErrors raised inside into the call's gRPC status."""
    try:
        yield
    except OutriderError as error:
        await abort(context, error)


def with_status(method: Method) -> Method:
    """A method of a servicer that answers once: OutriderErrors end its call with their gRPC status."""

    @functools.wraps(method)
    async def answer(servicer: Any, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        async with statuses(context):
            return await method(servicer, request, context)

    return cast("Method", answer)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OutriderError) -> NoReturn:
    """End a call with an error's status."""
    await context.abort(error.status.grpc, details(error.message), retry_metadata(error.retry_after))
    raise AssertionError("abort raises")


_DETAILS_BYTES = 4000  # a gRPC peer accepts 8 KiB of metadata; above, it reports that error instead of the status


def details(message: str) -> str:
    """An error message as the details of a status, cut to the length that gRPC can send (4,000 encoded bytes)."""
    size = 0
    for place, letter in enumerate(message):
        size += 1 if " " <= letter <= "~" and letter != "%" else 3 * len(letter.encode(errors="replace"))
        if size > _DETAILS_BYTES:
            return message[:place] + " ..."
    return message


RETRY_AFTER = "retry-after"
"""Key of a refusal's trailing metadata: seconds after which the client may retry."""


def retry_metadata(seconds: int | None) -> tuple[tuple[str, str], ...]:
    """Trailing metadata of a refusal."""
    # gRPC's own retries, if the client enables them, read the second entry.
    return () if seconds is None else ((RETRY_AFTER, str(seconds)), ("grpc-retry-pushback-ms", str(1000 * seconds)))
