"""One replica of a service: a channel, a handshake, and a bidirectional stream that reconnects.

    connect -> handshake -> stream (frames out, frames in) -> lost -> wait -> connect ...

Messages that arrive while a frame is being written are sent together in the next frame.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from gateway.streams.availability import READY, Availability, ReplicaState, after
from gateway.streams.connection import PLAIN, Connection
from gateway.streams.frames import FrameSignal
from gateway.streams.serving import check_serving, serving_changes, wait_serving
from gateway.streams.step_time import StepTime
from gateway.streams.traffic import Count, Direction, Traffic
from outrider import PROTOCOL_VERSION
from outrider.errors import ConfigError, OutriderError, Unavailable
from outrider.tls import explain_tls_failure
from outrider.transport.frame_socket import SocketCall, connect_beside, message_of, socket_beside
from outrider.transport.stream import PEER_METADATA
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)

_MIN_WAIT, _MAX_WAIT = 0.1, 2.0  # seconds between attempts
_STARTING_WAIT = 1.0  # seconds between attempts while the replica starts up and its health says so
_JITTER = 0.2  # of a wait, so that gateways do not reconnect all at once
_STABLE_AFTER = 2.0  # seconds after which a stream counts as working
CALL_TIMEOUT = 10.0  # seconds for each call of a handshake

Info = TypeVar("Info")
Frame = TypeVar("Frame")  # incoming frames
Metadata = Sequence[tuple[str, str]]


class Link(ABC, Generic[Info, Frame]):
    """A stream to one replica. `up` is true from handshake to loss.

    session_count: sessions that are open there, counted by the placement
    draining: it was removed from its pool and gets no new sessions. stopping: it reports that it does not serve,
        although its stream is open, because it stops or its engine hangs. rank: its place in the pool, by flag order
    load: the engine's last report on this stream. step_time: an average over the reports
    info: facts from the handshake. refusal: why the replica does not fit
    channel: while it is up or about to be. on_change: called after `up` or `availability` changed
    on_absent: called after each attempt to use it that failed. on_stopping: called after `stopping` changed
    transport: of the stream's frames, grpc or socket; empty before the first
    traffic: counts of frames, which links share
    """

    service: str
    method: str  # full name of the stream's method
    longest_refused_wait = _MAX_WAIT  # seconds between attempts while the replica does not fit
    frame: type[Any]  # message type of incoming frames
    features_are: Direction  # in which frames hidden states travel

    def __init__(self, address: str, connection: Connection = PLAIN) -> None:
        self.address = address
        self._connection = connection
        self._peer = secrets.token_hex(16)
        self.transport = ""
        self.traffic = Traffic()
        self.up = False
        self.session_count = 0
        self.draining = False
        self.stopping = False
        self.rank = 0
        self.load: common_pb2.EngineLoad | None = None
        self.step_time = StepTime()
        self.info: Info | None = None
        self.refusal: ConfigError | None = None
        self.channel: grpc.aio.Channel | None = None
        self.on_up: Callable[[], None] = lambda: None
        self.on_down: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        self.on_absent: Callable[[], None] = lambda: None
        self.on_stopping: Callable[[], None] = lambda: None
        self.on_frame: Callable[[Frame], Awaitable[None]] = _ignore  # frames are processed one after the other
        self.outgoing = FrameSignal()
        self._absence = Availability(ReplicaState.UNREACHABLE, "not connected yet")
        self._settled = asyncio.Event()  # up, or refused
        self._last_error: str | None = None  # gRPC's last reason for a failed connection
        self._task: asyncio.Task[None] | None = None
        self._restart: asyncio.Task[None] | None = None

    @property
    def max_sessions(self) -> int:
        """Sessions that the replica runs together; 0 while unknown."""
        return int(getattr(self.info, "max_running_sessions", 0))

    @property
    def availability(self) -> Availability:
        """Whether the replica is used; the reason of the last failed attempt if it is not."""
        if self.up and self.departing:
            why = "it was removed" if self.draining else "it reports that it stops or hangs"
            return Availability(ReplicaState.DRAINING, f"{why}; {self.session_count} sessions end here")
        return READY if self.up else self._absence

    @property
    def departing(self) -> bool:
        """True if its sessions move to other replicas."""
        return self.draining or self.stopping

    @property
    def open_to_sessions(self) -> bool:
        """True if new sessions may be opened there."""
        return self.up and not self.departing

    def update_load(self, load: common_pb2.EngineLoad) -> None:
        """Take the engine's report."""
        self.load = load
        self.step_time.add(load)

    # --- parts that differ by service ---

    @abstractmethod
    async def handshake(self, channel: grpc.aio.Channel) -> Info:
        """Ask for facts and check them. Raises ConfigError for a replica that does not fit."""

    async def prepare(self, channel: grpc.aio.Channel) -> None:
        """Make the calls that must precede the stream. The replica is serving by now."""

    def state_after(self, error: ConfigError) -> ReplicaState:
        """The state of a replica that `handshake` has refused."""
        del error
        return ReplicaState.REFUSED

    @abstractmethod
    def take_frame(self) -> Any:
        """The waiting messages as one frame; none are left."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the waiting messages."""

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

    def reconnect(self) -> None:
        """End the stream and repeat the handshake; `on_down` moves the sessions."""
        if self._restart is None or self._restart.done():  # otherwise a restart is under way
            self._restart = asyncio.create_task(self._start_again())

    async def _start_again(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self.start()

    async def stop(self) -> None:
        """End the stream without calling `on_down`."""
        if self._restart is not None:
            self._restart.cancel()
        self.up = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def settled(self) -> bool:
        """True once its first handshake has succeeded, or was refused."""
        return self._settled.is_set()

    async def wait_up(self, seconds: float) -> None:
        """Wait for the first handshake. Raises ConfigError if it was refused, Unavailable after `seconds`."""
        try:
            await asyncio.wait_for(self._settled.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"the {self.service} at {self.address} did not answer in {seconds:.0f} s") from None
        if self.refusal is not None:
            raise self.refusal

    def open_channel(self) -> grpc.aio.Channel:
        """A channel to the replica."""
        return self._connection.open(self.address)

    async def _checked_handshake(self, channel: grpc.aio.Channel) -> Info:
        try:
            return await self.handshake(channel)
        except grpc.aio.AioRpcError as error:
            # One probe per message, because the probe opens a connection of its own.
            if error.code() is grpc.StatusCode.UNAVAILABLE and error.details() != self._last_error:
                self._last_error = error.details()
                if trouble := await explain_tls_failure(self.address, self._connection.tls):
                    raise ConfigError(f"the {self.service} at {self.address} {trouble}") from None
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"the {self.service} at {self.address} refuses this gateway: {error.details()}"
                ) from None
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise ConfigError(
                    f"the service at {self.address} is no {self.service} of this release ({error.details()}); name it "
                    "as what it is, or start the same release there"
                ) from None
            raise

    async def _run(self) -> None:
        wait = _MIN_WAIT
        while True:
            opened, longest = math.inf, _MAX_WAIT
            try:
                async with self.open_channel() as channel:
                    self.channel = channel
                    self.info = await self._checked_handshake(channel)
                    await check_serving(channel, CALL_TIMEOUT)
                    await self.prepare(channel)
                    self.refusal = None
                    opened = time.monotonic()
                    await self._stream(channel)
            except ConfigError as error:
                if self.refusal is None or self.refusal.message != error.message:
                    log.error("%s", error.message)
                self.refusal = error
                self._settled.set()
                longest = self.longest_refused_wait
                self._absent(Availability(self.state_after(error), error.message))
            except grpc.aio.AioRpcError as error:
                self._absent(after(error))
            except Unavailable as error:
                self._absent(Availability(ReplicaState.STARTING, error.message))
            except OutriderError as error:
                log.warning("%s at %s: %s", self.service, self.address, error.message)
                self._absent(Availability(ReplicaState.FAILED, error.message))
            except Exception as error:  # a bug must not end the link
                log.exception("a frame of the %s at %s could not be processed", self.service, self.address)
                self._absent(Availability(ReplicaState.FAILED, f"{type(error).__name__}: {error}"))
            else:
                self._absent(Availability(ReplicaState.UNREACHABLE, "its stream was lost"))
            finally:
                self._lost()
            if self._absence.state is ReplicaState.STARTING:
                longest = _STARTING_WAIT
            # Attempts slow down while streams end soon after they open.
            wait = _MIN_WAIT if time.monotonic() - opened > _STABLE_AFTER else min(2 * wait, longest)
            await self._between_attempts(wait * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _between_attempts(self, seconds: float) -> None:
        """Wait before the next attempt; a replica that starts up is used as soon as it serves."""
        if self._absence.state is ReplicaState.STARTING:
            async with self.open_channel() as channel:
                await wait_serving(channel, seconds)
        else:
            await asyncio.sleep(seconds)

    def _absent(self, absence: Availability) -> None:
        """The replica is not used, for this reason."""
        if absence != self._absence:
            level = logging.WARNING if absence.state is ReplicaState.FAILED else logging.DEBUG
            log.log(level, "the %s at %s: %s", self.service, self.address, absence.reason)
        self._absence = absence

    def _lost(self) -> None:
        self.clear()
        self.channel = None
        lost, self.up, self.stopping = self.up, False, False
        self.step_time, self.load = StepTime(), None  # another process may come, or its sessions end meanwhile
        if lost:
            log.warning("the stream to the %s at %s is lost", self.service, self.address)
        try:
            if lost:
                self.on_down()
            self.on_absent()
        except Exception:  # a bug here must not end the link either
            log.exception("some sessions of the %s at %s could not be moved", self.service, self.address)
        self.on_change()

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        call = await self.start_call(channel)
        self._features = self.traffic.count("features", self.features_are, self.transport)
        received = self.traffic.count(self.service, "received", self.transport)
        self.clear()
        self.up = True
        log.info("connected to the %s at %s", self.service, self.address)
        self._settled.set()
        self.on_up()
        self.on_change()
        tasks = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch_health(channel))]
        try:
            while (content := await call.read()) is not grpc.aio.EOF:
                frame = message_of(self.frame, content)
                self._count(received, frame, len(content))
                await self.on_frame(frame)
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            # Their errors are dropped; a cancellation of this task must not be, or the task would run forever.
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch_health(self, channel: grpc.aio.Channel) -> None:
        """Follow what the replica reports of its health while its stream is open."""
        try:
            async for serves in serving_changes(channel):
                if serves != self.stopping:
                    continue
                self.stopping = not serves
                change = "serves again" if serves else "does not serve any more; its sessions move"
                log.info("the %s at %s %s", self.service, self.address, change)
                self.on_stopping()
                self.on_change()
        except grpc.aio.AioRpcError as error:  # its sessions move when its stream ends
            log.debug("the health of the %s at %s is not watched: %s", self.service, self.address, error.details())

    async def start_call(self, channel: grpc.aio.Channel) -> Any:
        """Open the stream, whose frames are bytes. Raises ConfigError if they must use a socket and there is none."""
        allowed = self._connection.transport
        key = None if allowed == "grpc" else await connect_beside(self.address)
        if key is not None:
            self.transport = "socket"
            return SocketCall(self.open_stream(channel, key.metadata), key.connection)
        if allowed == "socket":
            beside = socket_beside(self.address)
            where = "its address is no Unix domain socket" if beside is None else f"no process listens at {beside}"
            raise ConfigError(
                f"--stream-transport socket: the {self.service} at {self.address} cannot be reached that way, because "
                f"{where}; choose grpc or auto, or let the service listen on unix:/PATH of this machine"
            )
        self.transport = "grpc"
        return self.open_stream(channel, ())

    def open_stream(self, channel: grpc.aio.Channel, metadata: Metadata) -> Any:
        """The stream call; it reads and writes bytes."""
        return channel.stream_stream(self.method)(metadata=(*metadata, (PEER_METADATA, self._peer)))

    async def _write(self, call: Any) -> None:
        outgoing, sent = self.outgoing, self.traffic.count(self.service, "sent", self.transport)
        while True:
            await outgoing.wait()
            outgoing.clear()
            frame = self.take_frame()
            content = frame.SerializeToString()
            try:
                await call.write(content)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the reader receives the reason
            self._count(sent, frame, len(content))

    def _count(self, count: Count, frame: Any, size: int) -> None:
        count.add(size)
        if self.features_are == ("received" if isinstance(frame, self.frame) else "sent") and frame.features.rows:
            self._features.add(len(frame.features.rows))


async def _ignore(_: Any) -> None:
    """The default handler of frames."""


async def collect_files(parts: AsyncIterator[Any]) -> dict[str, bytes]:
    """Files that arrive in parts, by name."""
    files: dict[str, bytearray] = {}
    async for part in parts:
        files.setdefault(part.file_name, bytearray()).extend(part.content)
    return {name: bytes(content) for name, content in files.items()}
