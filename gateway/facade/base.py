"""The base of the facades: authentication, generations, and errors as the statuses that routers expect.

Routers take INVALID_ARGUMENT for the caller's mistake, and most other statuses for a broken worker.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2

from gateway.admission.caller import CALLER, peer_network
from gateway.facade.backend import Backend
from gateway.facade.bundle import chunks
from gateway.facade.info import Loads
from gateway.orchestration.generation import Generation
from gateway.sessions.request import GenerationRequest
from gateway.telemetry.spans import spanning_call
from outrider.errors import InvalidRequest, Unavailable
from outrider.telemetry import REQUEST_ID
from outrider.transport.statuses import details, statuses

_STARTING = "the gateway waits for a target of its default model; retry later"


class Facade:
    """One gRPC service. Subclasses are servicers, with a method for each call.

    name: full name of the service. messages: module of its messages. register: adds a servicer to a server.
    """

    name: ClassVar[str]
    messages: ClassVar[Any]
    register: ClassVar[Callable[[Any, Any], None]]

    def __init__(self) -> None:
        self._loads = Loads()
        self._backend: Backend | None = None
        self._received = 0.0  # time of the last Generate, in seconds since 1970

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service at a server."""
        type(self).register(self, server)

    def serve(self, backend: Backend | None) -> None:
        """Answer calls from now on; before that, and with None, every call is Unavailable."""
        self._backend = backend

    # --- for subclasses ---

    @contextlib.asynccontextmanager
    async def _call(self, context: Any, *, generates: bool = False) -> AsyncIterator[Backend]:
        """Context of a call: checks its key, and turns OutriderErrors into its status."""
        async with statuses(context):
            try:
                backend = self._backend
                if backend is None:
                    raise Unavailable(_STARTING)
                caller = backend.keys.check(_authorization(context), network=peer_network(context.peer()))
                with backend.keys.request(caller) if generates else contextlib.nullcontext():
                    yield backend
            except InvalidRequest as error:  # with its subclasses
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details(error.message))

    async def _refuse(self, context: Any, message: str) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)
        raise AssertionError("abort raises")

    @contextlib.asynccontextmanager
    async def _started(
        self, backend: Backend, context: Any, requests: Sequence[GenerationRequest], name: str, *, stream: bool
    ) -> AsyncIterator[list[Generation]]:
        """Context of running generations, one per request, which are closed at its end.

        context: of the call. name: for Abort, logs and traces. stream: True if the answer is streamed
        """
        self._received = time.time()
        REQUEST_ID.set(name)
        with contextlib.ExitStack() as stack:
            span = stack.enter_context(
                spanning_call(backend.tracing, context, f"{self.name}/Generate", name, stream=stream)
            )
            generations = await backend.generator.start_all([(request, name) for request in requests], span)
            for generation in generations:
                stack.callback(generation.close)
            yield generations

    async def _health(self, context: Any) -> tuple[bool, str]:
        """Whether the gateway can generate, and why not. Requires no key.

        While the gateway starts the call is Unavailable, because a router that gets an answer asks for the facts of the
        model once and never again.
        """
        if self._backend is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _STARTING)
            raise AssertionError("abort raises")
        generator = self._backend.generator
        if generator.admission.draining:
            return False, "the gateway is shutting down"
        up = any(target.open_to_sessions for target in generator.orchestrator.targets)
        return up, "; ".join(self._backend.facts.health(generator).state().get("missing", ())) or "ok"

    # --- calls that are equal in all facades ---

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether the gateway can generate. Requires no key."""
        del request
        healthy, message = await self._health(context)
        return self.messages.HealthCheckResponse(healthy=healthy, message=message)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The tokenizer's files as a zip archive, in parts; the last part has its SHA-256."""
        del request
        async with self._call(context) as backend:
            data, digest = backend.archive
            for part, last in chunks(data):
                yield common_pb2.GetTokenizerChunk(data=part, sha256=digest if last else "")

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Drop cached prefixes once no request is running. Requires an administrator's key."""
        async with self._call(context) as backend:
            backend.keys.check_admin(CALLER.get())
            try:
                await backend.control.flush_cache(request.timeout_s)
            except InvalidRequest as error:
                return common_pb2.FlushCacheResponse(success=False, message=error.message)
            return common_pb2.FlushCacheResponse(success=True, message="Cache flushed.")
        raise AssertionError("abort raises")

    async def Embed(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        """Refused."""
        del request
        await self._refuse(context, "this server generates text; it has no embeddings")

    async def StartProfile(self, request: Any, context: Any) -> NoReturn:  # noqa: N802
        """Refused."""
        del request
        await self._refuse(context, "profiles cannot be taken over this service")

    StopProfile = StartProfile

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Refused; GetLoads returns the load."""
        del request
        await self._refuse(context, "events of the KV cache are not published; ask GetLoads for the load")
        yield  # makes this a generator, as gRPC requires for a stream


def _authorization(context: Any) -> bytes:
    return str(dict(context.invocation_metadata() or ()).get("authorization", "")).encode()
