"""One replica of a service: a channel, a handshake, and a bidirectional stream that reconnects.

connect -> handshake -> stream (frames out, frames in) -> lost -> wait -> connect ...
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from gateway.streams.availability import READY, Availability, ReplicaState
from gateway.streams.connection import PLAIN, Connection
from gateway.streams.replica.absence import Absence
from gateway.streams.replica.attempts import MAX_WAIT, Attempt, Attempts
from gateway.streams.replica.frame_stream import FrameStream, StreamType
from gateway.streams.replica.load import ReplicaLoad
from gateway.streams.serving import check_serving, serving_changes
from outrider import PROTOCOL_VERSION
from outrider.errors import ConfigError, Unavailable
from outrider.wire.v1 import common_pb2

log = logging.getLogger(__name__)

CALL_TIMEOUT = 10.0  # seconds for each call of a handshake

Info = TypeVar("Info")
Frame = TypeVar("Frame")  # incoming frames


@dataclass
class LinkEvents:
    """What the owners of a link are called for.

    up, down: its stream has opened, or is lost. change: after `up` or `availability` has changed
    absent: after each attempt to use the replica that failed. stopping: after `stopping` has changed
    """

    up: Callable[[], None] = lambda: None
    down: Callable[[], None] = lambda: None
    change: Callable[[], None] = lambda: None
    absent: Callable[[], None] = lambda: None
    stopping: Callable[[], None] = lambda: None


class Link(ABC, Generic[Info, Frame]):
    """A stream to one replica. `up` is true from handshake to loss.

    draining: it was removed from its pool and gets no new sessions. stopping: it reports that it does not serve,
        although its stream is open, because it stops or its engine hangs. rank: its place in the pool, by flag order
    info: facts from the handshake
    channel: while it is up or about to be
    """

    service: str
    stream_type: StreamType
    longest_refused_wait = MAX_WAIT  # seconds between attempts while the replica does not fit

    def __init__(self, address: str, connection: Connection = PLAIN) -> None:
        self.address = address
        self._connection = connection
        self.up = False
        self.draining = False
        self.stopping = False
        self.rank = 0
        self.info: Info | None = None
        self.channel: grpc.aio.Channel | None = None
        self.load = ReplicaLoad()
        self.events = LinkEvents()
        self.absence = Absence(self.service, address, connection.tls)
        self.stream: FrameStream[Frame] = FrameStream(self.service, self.stream_type, address, connection)
        self._attempts = Attempts(f"{self.service} {address}", self._attempt, self.open_channel)

    @property
    def max_sessions(self) -> int:
        """Sessions that the replica runs together; 0 while unknown."""
        return int(getattr(self.info, "max_running_sessions", 0))

    @property
    def availability(self) -> Availability:
        """Whether the replica is used; the reason of the last failed attempt if it is not."""
        if self.up and self.departing:
            why = "it was removed" if self.draining else "it reports that it stops or hangs"
            return Availability(ReplicaState.DRAINING, f"{why}; {self.load.session_count} sessions end here")
        return READY if self.up else self.absence.reason

    @property
    def departing(self) -> bool:
        """True if its sessions move to other replicas."""
        return self.draining or self.stopping

    @property
    def open_to_sessions(self) -> bool:
        """True if new sessions may be opened there."""
        return self.up and not self.departing

    def update_load(self, report: common_pb2.EngineLoad) -> None:
        """Take the engine's report."""
        self.load.update(report)

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

    # --- life ---

    def start(self) -> None:
        """Connect, and stay connected."""
        self._attempts.start()

    def reconnect(self) -> None:
        """End the stream and repeat the handshake; `events.down` moves the sessions."""
        self._attempts.restart()

    async def stop(self) -> None:
        """End the stream without calling `events.down`."""
        self.up = False
        await self._attempts.stop()

    async def wait_up(self, seconds: float) -> None:
        """Wait for the first handshake. Raises ConfigError if it was refused, Unavailable after `seconds`."""
        try:
            await asyncio.wait_for(self.absence.settled.wait(), seconds)
        except TimeoutError:
            raise Unavailable(f"the {self.service} at {self.address} did not answer in {seconds:.0f} s") from None
        if self.absence.refusal is not None:
            raise self.absence.refusal

    def open_channel(self) -> grpc.aio.Channel:
        """A channel to the replica."""
        return self._connection.open(self.address)

    async def _attempt(self) -> Attempt:
        """Connect, and process frames until the stream is lost."""
        opened, longest = math.inf, MAX_WAIT
        try:
            async with self.open_channel() as channel:
                self.channel = channel
                self.info = await self.absence.explained(self.handshake(channel))
                await check_serving(channel, CALL_TIMEOUT)
                await self.prepare(channel)
                self.absence.refusal = None
                opened = time.monotonic()
                await self._stream(channel)
        except ConfigError as error:
            longest = self.longest_refused_wait
            self.absence.refused(error, self.state_after(error))
        except Exception as error:  # a bug must not end the link
            self.absence.failed(error)
        else:
            self.absence.set(Availability(ReplicaState.UNREACHABLE, "its stream was lost"))
        finally:
            self._lost()
        return Attempt(opened, longest, starting=self.absence.reason.state is ReplicaState.STARTING)

    def _lost(self) -> None:
        self.clear()
        self.channel = None
        lost, self.up, self.stopping = self.up, False, False
        self.load.forget()
        if lost:
            log.warning("the stream to the %s at %s is lost", self.service, self.address)
        try:
            if lost:
                self.events.down()
            self.events.absent()
        except Exception:  # a bug here must not end the link either
            log.exception("some sessions of the %s at %s could not be moved", self.service, self.address)
        self.events.change()

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        call = await self.stream.start_call(channel)
        self.clear()
        self.up = True
        log.info("connected to the %s at %s", self.service, self.address)
        self.absence.settled.set()
        self.events.up()
        self.events.change()
        work = self.stream.write(call, self.take_frame), self._watch_health(channel)
        tasks = [asyncio.create_task(one) for one in work]
        try:
            await self.stream.read(call)
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
                self.events.stopping()
                self.events.change()
        except grpc.aio.AioRpcError as error:  # its sessions move when its stream ends
            log.debug("the health of the %s at %s is not watched: %s", self.service, self.address, error.details())


def check_version(service: str, address: str, version: int) -> None:
    """Raise ConfigError for a replica that speaks another version of the protocol."""
    if version != PROTOCOL_VERSION:
        raise ConfigError(
            f"the {service} at {address} speaks protocol version {version}, this gateway {PROTOCOL_VERSION}; run the "
            "same release everywhere"
        )
