"""Checks of every call of a gRPC port before a message of it is read, and the limits of the port.

connection   at most `Limits.connections`; one that is silent during its handshake, idle, or dead is closed
call         the guard checks the caller's key or token, which metadata carries; a refused call reads nothing
message      gRPC drops one above `Limits.message_bytes`; one above its method's size is not parsed
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from outrider.errors import InvalidRequest, OutriderError
from outrider.transport.frame_socket import MAX_MESSAGE_BYTES
from outrider.transport.statuses import abort, statuses

HEALTH_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")
"""Methods that need no key, because probes have none."""

MAX_WATCHES = 64
"""Health checks of a port that may wait for changes at a time, besides those of callers with a key."""

Check = Callable[[Mapping[str, Any]], object]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # generic only for type checkers

_PART_BYTES = 4 << 20  # of weights and of fusion layers, whose senders cut them to 1 MiB
_SMALL_BYTES = 1 << 20  # of all other messages to a service
SERVICE_SIZES = {
    "/outrider.wire.v1.TargetService/Verify": MAX_MESSAGE_BYTES,
    "/outrider.wire.v1.DraftService/Propose": MAX_MESSAGE_BYTES,
    "/outrider.wire.v1.TargetService/UpdateWeightsFromTensor": _PART_BYTES,
    "/outrider.wire.v1.TargetService/ConfigureFeatures": _PART_BYTES,
    "/outrider.wire.v1.DraftService/UpdateSharedWeights": _PART_BYTES,
}
"""Maximum size of a message to a service, in bytes, where it is not 1 MiB."""


@dataclass(frozen=True)
class Limits:
    """Limits of a gRPC port.

    message_bytes: of a message that gRPC receives. calls: in progress in one connection; further ones wait at the
    client. connections: open at a time. sizes: maximum size of a message by method, other_size of other methods; None
    is message_bytes for all. handshake_ms: for a connection's beginning. idle_ms: without a call. ping_ms: between two
    pings
    """

    message_bytes: int = MAX_MESSAGE_BYTES
    calls: int = 256
    connections: int = 1024
    sizes: Mapping[str, int] | None = field(default_factory=lambda: SERVICE_SIZES)
    other_size: int = _SMALL_BYTES
    handshake_ms: int = 10_000
    idle_ms: int = 300_000
    ping_ms: int = 20_000

    def options(self) -> list[tuple[str, int]]:
        """Options of a server."""
        # Half of the files are left for everything else; at the system's limit no connection could be accepted.
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return [
            ("grpc.max_receive_message_length", self.message_bytes),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_concurrent_streams", self.calls),
            ("grpc.max_allowed_incoming_connections", max(min(self.connections, files // 2), 1)),
            ("grpc.server_handshake_timeout_ms", self.handshake_ms),
            ("grpc.max_connection_idle_ms", self.idle_ms),
            # Peers that vanished: their connection is closed, which ends their sessions.
            ("grpc.keepalive_time_ms", self.ping_ms),
            ("grpc.keepalive_timeout_ms", self.ping_ms // 2),
            ("grpc.http2.ping_timeout_ms", self.ping_ms // 2),  # the longer of this and keepalive_timeout_ms applies
            ("grpc.http2.max_pings_without_data", 0),
            # Clients may send pings of their own.
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]


class Guard(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key, and messages that are too large for their method."""

    def __init__(self, check: Check | None, public: Collection[str] = (), limits: Limits | None = None) -> None:
        """check: raises an OutriderError for the metadata of a call that is refused; None refuses none.

        public: methods that need no key, besides health checks
        """
        self._check = check
        self._public = frozenset((*HEALTH_METHODS, *public))
        self._limits = limits or Limits()
        self._handlers: dict[str, Handler] = {}  # with bounded messages, by method

    def permits(self, metadata: Any) -> bool:
        """True if a call with this metadata has a valid key, or none is needed."""
        with contextlib.suppress(OutriderError):
            if self._check is not None:
                self._check(dict(metadata or ()))
            return True
        return False

    def knows(self, metadata: Any) -> bool:
        """True if a key is needed, and a call with this metadata has a valid one."""
        return self._check is not None and self.permits(metadata)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Handler | None:
        """The handler of a call, called before any message is read."""
        method = handler_call_details.method
        handler: Handler | None = await continuation(handler_call_details)
        if handler is None:  # routers try which services there are
            return None
        if self._check is not None and method not in self._public:
            try:
                self._check(dict(handler_call_details.invocation_metadata or ()))
            except OutriderError as error:
                return _refusal(error)
        if self._limits.sizes is None:
            return handler
        if method not in self._handlers:
            self._handlers[method] = _bounded(handler, self._limits.sizes.get(method, self._limits.other_size))
        return self._handlers[method]


def _refusal(error: OutriderError) -> Handler:
    """A handler that ends the call. It is one of streams, because those read a message only when they ask for it."""

    async def refuse(_: Any, context: Any) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _bounded(handler: Any, size: int) -> Handler:
    """The handler, whose messages are refused above a size in bytes before they are parsed."""
    parse = handler.request_deserializer or bytes

    def checked(content: bytes) -> Any:
        if len(content) > size:
            raise InvalidRequest(f"a message of {len(content)} bytes is too large for this call; {size} are allowed")
        try:
            return parse(content)
        except DecodeError:
            raise InvalidRequest("the message cannot be parsed") from None

    # An error of a deserializer reaches a handler that reads messages itself, and otherwise becomes UNKNOWN.
    if handler.stream_stream is not None:
        return grpc.stream_stream_rpc_method_handler(handler.stream_stream, checked, handler.response_serializer)
    if handler.stream_unary is not None:
        return grpc.stream_unary_rpc_method_handler(handler.stream_unary, checked, handler.response_serializer)
    return _checked_unary(handler, checked)


def _checked_unary(handler: Any, checked: Callable[[bytes], Any]) -> Handler:
    """The handler of a single message, which is checked inside the call."""
    if handler.unary_unary is not None:

        async def answer(content: bytes, context: Any) -> Any:
            async with statuses(context):
                message = checked(content)
            return await handler.unary_unary(message, context)

        return grpc.unary_unary_rpc_method_handler(answer, None, handler.response_serializer)

    async def stream(content: bytes, context: Any) -> None:
        async with statuses(context):
            message = checked(content)
        answers = handler.unary_stream(message, context)
        if not hasattr(answers, "__aiter__"):  # it writes by itself
            await answers
            return
        async with contextlib.aclosing(answers):
            async for part in answers:
                await context.write(part)

    return grpc.unary_stream_rpc_method_handler(stream, None, handler.response_serializer)
