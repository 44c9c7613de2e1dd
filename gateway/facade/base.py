"""What the facades share: what is behind them, who may call, and errors as the statuses that routers expect.

Routers take INVALID_ARGUMENT for the caller's mistake, and most other statuses for a worker that is broken.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, ClassVar, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2

from gateway.admission.admission import check_admin
from gateway.facade.backend import Backend
from gateway.facade.bundle import chunks
from gateway.facade.knowledge import Loads
from gateway.orchestration.generation import Generation
from gateway.sessions.request import GenerationRequest
from gateway.telemetry.spans import spanning_call
from outrider.errors import InvalidRequest, Unavailable
from outrider.telemetry import REQUEST_ID
from outrider.transport.rpc import details, statuses

_STARTING = "the gateway is starting; it waits for a target service"


class Facade:
    """One service. Its subclasses are servicers: they answer to calls by name.

    name: of the service, in full. messages: the module of its messages. register: adds a servicer to a server.
    """

    name: ClassVar[str]
    messages: ClassVar[Any]
    register: ClassVar[Callable[[Any, Any], None]]

    def __init__(self) -> None:
        self._loads = Loads()
        self._backend: Backend | None = None
        self._received = 0.0  # when the last request for text came, in seconds since 1970

    def add_to(self, server: grpc.aio.Server) -> None:
        """Make it known to a server."""
        type(self).register(self, server)

    def serve(self, backend: Backend) -> None:
        """Answer from now on. Until then every call is Unavailable."""
        self._backend = backend

    # --- for subclasses ---

    @contextlib.asynccontextmanager
    async def _call(self, context: Any, *, generates: bool = False) -> AsyncIterator[Backend]:
        """A call under way: its caller is let in, and OutriderErrors become its status."""
        async with statuses(context):
            try:
                backend = self._backend
                if backend is None:
                    raise Unavailable(_STARTING)
                key = backend.keys.check(_authorization(context))
                with backend.keys.request(key) if generates else contextlib.nullcontext():
                    yield backend
            except InvalidRequest as error:  # its kinds, too
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, details(error.message))

    async def _refuse(self, context: Any, what: str) -> NoReturn:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, what)
        raise AssertionError("an aborted call does not go on")

    @contextlib.asynccontextmanager
    async def _started(
        self, backend: Backend, context: Any, requests: Sequence[GenerationRequest], name: str, *, stream: bool
    ) -> AsyncIterator[list[Generation]]:
        """Generations under way, one for each request; however it ends, they are closed.

        context: of the call. name: for Abort, in logs and traces. stream: whether the answer comes in parts
        """
        self._received = time.time()
        REQUEST_ID.set(name)
        generations: list[Generation] = []
        with contextlib.ExitStack() as stack:
            span = stack.enter_context(
                spanning_call(backend.tracing, context, f"{self.name}/Generate", name, stream=stream)
            )
            async for generation in backend.generator.start_all([(request, name) for request in requests], span):
                stack.callback(generation.close)
                generations.append(generation)
            yield generations

    async def _health(self, context: Any) -> tuple[bool, str]:
        """Whether text can be had, and what is in its way. Asks for no key.

        While the gateway starts it is Unavailable: a router that gets any answer takes it for a worker that can tell
        its facts, asks for them once, and does not ask again.
        """
        if self._backend is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _STARTING)
            raise AssertionError("an aborted call does not go on")
        generator = self._backend.generator
        if generator.admission.draining:
            return False, "the gateway is shutting down"
        up = any(target.up for target in generator.orchestrator.targets)
        return up, "; ".join(generator.orchestrator.missing()) or "ok"

    # --- calls that are the same in all services ---

    async def HealthCheck(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Whether text can be had. Asks for no key."""
        del request
        healthy, message = await self._health(context)
        return self.messages.HealthCheckResponse(healthy=healthy, message=message)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The tokenizer's files as a zip archive, in parts; the last one has its SHA-256."""
        del request
        async with self._call(context) as backend:
            data, digest = backend.archive
            for part, last in chunks(data):
                yield common_pb2.GetTokenizerChunk(data=part, sha256=digest if last else "")

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Drop cached prefixes once nothing is under way; for the administrator, where there is a key for that."""
        async with self._call(context) as backend:
            check_admin(_authorization(context), backend.facts.config.admin_api_key)
            try:
                await backend.control.flush_cache(request.timeout_s)
            except InvalidRequest as error:
                return common_pb2.FlushCacheResponse(success=False, message=error.message)
            return common_pb2.FlushCacheResponse(success=True, message="Cache flushed.")
        raise AssertionError("an aborted call does not go on")

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
        """Refused; GetLoads tells of loads."""
        del request
        await self._refuse(context, "events of the KV cache are not published; ask GetLoads for the load")
        yield  # a stream, for gRPC


def _authorization(context: Any) -> bytes:
    return str(dict(context.invocation_metadata() or ()).get("authorization", "")).encode()
