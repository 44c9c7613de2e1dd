"""One replica of a service: a channel, a handshake, and a bidirectional stream that comes back by itself.

    connect -> handshake -> stream (frames out, frames in) -> lost -> wait a little -> connect ...

What is to be said gathers while a frame is being written, and leaves as one frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from outrider import PROTOCOL_VERSION
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.tls import ClientTls, explain_tls_failure, open_channel
from outrider.transport.frame_socket import SocketCall, connect_beside
from outrider.transport.rpc import CHANNEL_OPTIONS
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0  # seconds between attempts
_HELD = 0.5  # seconds that what is not urgent may gather
_LASTING = 2.0  # seconds after which a stream is believed to work
CALL_TIMEOUT = 10.0  # seconds for the calls of a handshake

Info = TypeVar("Info")
Frame = TypeVar("Frame")  # what comes in
Metadata = Sequence[tuple[str, str]]


class Link(ABC, Generic[Info, Frame]):
    """A stream to one replica. `up` is true between handshake and loss."""

    service: str
    frame: type[Any]  # message that comes in

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        self.address = address
        self._tls = tls
        self.up = False
        self.session_count = 0  # kept by whoever places them
        self.load: common_pb2.EngineLoad | None = None  # what the engine said last
        self.info: Info | None = None
        self.refusal: ConfigError | None = None
        self.channel: grpc.aio.Channel | None = None  # while it is up, or about to be
        self.on_up: Callable[[], None] = lambda: None
        self.on_down: Callable[[], None] = lambda: None
        self.on_frame: Callable[[Frame], Awaitable[None]] = _unheard  # frames are taken one after the other
        self._pending = asyncio.Event()
        self._settled = asyncio.Event()  # up, or refused
        self._complaint: str | None = None  # what gRPC said when it could not connect
        self._later: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._again: asyncio.Task[None] | None = None

    @property
    def places(self) -> int:
        """Sessions that run there together; 0 as long as that is not known."""
        return int(getattr(self.info, "max_running_sessions", 0))

    # --- what a service fills in ---

    @abstractmethod
    async def _handshake(self, channel: grpc.aio.Channel) -> Info:
        """Ask for facts and check them. Raises ConfigError for a replica that does not fit."""

    async def _prepare(self, channel: grpc.aio.Channel) -> None:
        """Say what must be said before its stream opens. It serves by now."""

    @abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """The stream call."""

    @abstractmethod
    def _take(self) -> Any:
        """What has gathered, as one frame; empties it."""

    @abstractmethod
    def _clear(self) -> None:
        """Forget what has gathered."""

    def _check_version(self, version: int) -> None:
        """Raise ConfigError for a replica that speaks another version of the protocol."""
        if version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the {self.service} at {self.address} speaks protocol version {version}, this gateway "
                f"{PROTOCOL_VERSION}; run the same release everywhere"
            )

    # --- life ---

    def start(self) -> None:
        """Connect, and stay connected."""
        self._task = asyncio.create_task(self._run(), name=f"{self.service} {self.address}")

    def shake_hands_again(self) -> None:
        """End the stream, and look anew whether the replica fits; whoever has sessions there hears of it."""
        if self._again is None or self._again.done():  # else it is about to
            self._again = asyncio.create_task(self._start_anew())

    async def _start_anew(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self.start()

    async def stop(self) -> None:
        """End the stream, quietly."""
        if self._again is not None:
            self._again.cancel()
        self.up = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def wait_up(self, seconds: float) -> None:
        """Wait for the first handshake. Raises ConfigError if it was refused, else Unavailable."""
        try:
            await asyncio.wait_for(self._settled.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"the {self.service} at {self.address} did not answer in {seconds:.0f} s") from None
        if self.refusal is not None:
            raise self.refusal

    def wake(self) -> None:
        """Something has gathered."""
        self._pending.set()

    def wake_later(self) -> None:
        """Something has gathered that need not be said at once."""
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(_HELD, self.wake)

    def open_channel(self) -> grpc.aio.Channel:
        """A channel to the replica."""
        return open_channel(self.address, CHANNEL_OPTIONS, self._tls)

    async def _shake_hands(self, channel: grpc.aio.Channel) -> Info:
        try:
            return await self._handshake(channel)
        except grpc.aio.AioRpcError as error:
            # Asked once a message: the probe is a connection of its own.
            if error.code() is grpc.StatusCode.UNAVAILABLE and error.details() != self._complaint:
                self._complaint = error.details()
                if trouble := await explain_tls_failure(self.address, self._tls):
                    raise ConfigError(f"the {self.service} at {self.address} {trouble}") from None
            raise

    async def _run(self) -> None:
        wait = _FIRST_WAIT
        while True:
            opened = math.inf
            try:
                async with self.open_channel() as channel:
                    self.channel = channel
                    self.info = await self._shake_hands(channel)
                    await _check_serving(channel)
                    await self._prepare(channel)
                    self.refusal = None
                    opened = time.monotonic()
                    await self._stream(channel)
            except ConfigError as error:
                if self.refusal is None or self.refusal.message != error.message:
                    log.error("%s", error.message)
                self.refusal = error
                self._settled.set()
                wait = _LONGEST_WAIT
            except grpc.aio.AioRpcError as error:
                log.debug("%s at %s: %s", self.service, self.address, error.details())
            except Unavailable as error:
                log.debug("%s at %s: %s", self.service, self.address, error.message)
            except OutriderError as error:
                log.warning("%s at %s: %s", self.service, self.address, error.message)
            except Exception:  # a bug must not end the link
                log.exception("a frame of the %s at %s was not understood", self.service, self.address)
            finally:
                self._lost()
            # A service whose streams do not last is not asked again and again.
            wait = _FIRST_WAIT if time.monotonic() - opened > _LASTING else min(2 * wait, _LONGEST_WAIT)
            await asyncio.sleep(wait)

    def _lost(self) -> None:
        self._clear()
        self.channel = None
        if self.up:
            self.up = False
            log.warning("the stream to the %s at %s is lost", self.service, self.address)
            try:
                self.on_down()
            except Exception:  # nor may this one
                log.exception("not all sessions of the %s at %s could go on", self.service, self.address)

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        call = await self._call(channel)
        self._clear()
        self.up = True
        log.info("connected to the %s at %s", self.service, self.address)
        self._settled.set()
        self.on_up()
        writer = asyncio.create_task(self._write(call))
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                await self.on_frame(frame)
        finally:
            writer.cancel()
            call.cancel()
            # What ended the writer is not told; what ends this task meanwhile must be, or it would go on for ever.
            await asyncio.gather(writer, return_exceptions=True)

    async def _call(self, channel: grpc.aio.Channel) -> Any:
        """The stream call, with frames past it where the service is on this machine."""
        key = await connect_beside(self.address)
        if key is None:
            return self._open_stream(channel, ())
        return SocketCall(self._open_stream(channel, key.metadata), key.connection, self.frame)

    async def _write(self, call: Any) -> None:
        while True:
            await self._pending.wait()
            self._pending.clear()
            if self._later is not None:
                self._later.cancel()
                self._later = None
            try:
                await call.write(self._take())
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader sees why


async def _unheard(_: Any) -> None:
    """Nobody listens."""


async def _check_serving(channel: grpc.aio.Channel) -> None:
    """Raise Unavailable until the service has warmed up and says so."""
    stub: Any = HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CALL_TIMEOUT)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise Unavailable("it is warming up")


async def collect_files(parts: AsyncIterator[Any]) -> dict[str, bytes]:
    """Files that arrive in parts, by name."""
    files: dict[str, bytearray] = {}
    async for part in parts:
        files.setdefault(part.file_name, bytearray()).extend(part.content)
    return {name: bytes(content) for name, content in files.items()}
