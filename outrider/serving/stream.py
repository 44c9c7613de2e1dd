"""Streams of an engine: many gateways on one engine, one bidirectional stream each.

Frames arrive in the network thread, are decoded and handed to the engine loop. What a step says is routed to the
streams that own its sessions; while a stream is busy writing, later steps gather in its next frame. A stream is the
lease of its sessions: when it ends, for whatever reason, they are closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Generic, TypeVar

import grpc

from outrider.errors import InvalidRequest
from outrider.serving.features import BACKLOG_BYTES, FeatureBlock, cut
from outrider.serving.messages import Message, SessionFailure, StepOutput
from outrider.serving.pipe import PipeDoor
from outrider.speculation.proposal import FinishReason

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Decode = Callable[[Request], tuple[Message, list[SessionFailure]]]
Encode = Callable[[StepOutput], Response]


class _Outbox:
    """What a stream has yet to say: a frame for each label of the weights that it was computed with."""

    def __init__(self) -> None:
        self._frames = deque([StepOutput()])
        self._features: list[FeatureBlock] = []  # they go behind all commits
        self._backlog = 0  # bytes of features
        self._ready = asyncio.Event()
        self.closed = False

    def add(self, output: StepOutput) -> None:
        last = self._frames[-1]
        if last.load.weight_version not in ("", output.load.weight_version):
            last = StepOutput()
            self._frames.append(last)
        last.extend(replace(output, features=[]))  # they have a limit
        for block in output.features:
            if self._backlog + block.rows.nbytes > BACKLOG_BYTES:
                log.warning("a peer is too slow for its features; those of session %d are dropped", block.session_id)
                continue
            self._features.append(block)
            self._backlog += block.rows.nbytes
        self._ready.set()

    def fail(self, failures: list[SessionFailure]) -> None:
        self._frames[-1].failures += failures
        self._ready.set()

    def close(self) -> None:
        self.closed = True
        self._ready.set()

    async def take(self) -> StepOutput | None:
        """The next frame's content; None once the stream is closed. Many features take several frames."""
        await self._ready.wait()
        self._ready.clear()
        if self.closed:
            return None
        output = self._frames.popleft()
        if not self._frames:
            output.features, self._features = cut(self._features)
            self._backlog -= sum(block.rows.nbytes for block in output.features)
            self._frames.append(StepOutput(load=output.load))
            if self._features:
                self._ready.set()
        else:
            self._ready.set()
        return output


class StreamHub(Generic[Request, Response]):
    """Routes between an engine loop and its streams. All but `publish` runs in the network thread."""

    def __init__(self, submit: Callable[[Message], None], decode: Decode[Request], encode: Encode[Response]) -> None:
        """submit: hands a message to the engine loop. decode, encode: between frames and domain types."""
        self._submit = submit
        self._decode = decode
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._owners: dict[int, _Outbox] = {}
        self._outboxes: set[_Outbox] = set()
        self.pipes = PipeDoor()

    def publish(self, output: StepOutput) -> None:
        """Route a step's output; called in the engine thread, once a step."""
        self._loop.call_soon_threadsafe(self._route, output)

    def close(self) -> None:
        """End all streams."""
        for outbox in self._outboxes:
            outbox.close()

    async def answer(
        self, requests: AsyncIterator[Request], context: grpc.aio.ServicerContext[Any, Any], kind: Any
    ) -> AsyncIterator[Response]:
        """A stream call, from its beginning to its end. Yields nothing where frames go past it.

        kind: of the messages that come
        """
        pipe = await self.pipes.pipe_of(context)
        if pipe is None:
            async for response in self.serve(requests):
                yield response
            return
        try:
            async with aclosing(self.serve(pipe.messages(kind))) as responses:
                async for response in responses:
                    await pipe.write(response)
        except ConnectionError:
            log.debug("a peer has ended its stream")
        finally:
            pipe.close()

    async def serve(self, requests: AsyncIterator[Request]) -> AsyncGenerator[Response, None]:
        """One stream: reads its frames, yields the answers, closes its sessions at the end."""
        outbox = _Outbox()
        self._outboxes.add(outbox)
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            while (output := await outbox.take()) is not None:
                yield self._encode(output)
            if reader.done() and not reader.cancelled() and (error := reader.exception()) is not None:
                raise error
        finally:
            reader.cancel()
            self._outboxes.discard(outbox)
            orphans = [session_id for session_id, owner in self._owners.items() if owner is outbox]
            for session_id in orphans:
                del self._owners[session_id]
            if orphans:
                log.info("a stream ended; its %d sessions are closed", len(orphans))
                self._submit(Message(closes=orphans))

    async def _read(self, requests: AsyncIterator[Request], outbox: _Outbox) -> None:
        try:
            async for frame in requests:
                message, failures = self._decode(frame)
                for request in message.opens:
                    self._owners[request.session_id] = outbox
                # A draft is told of a session's end by its last commit.
                ended = (c.session_id for c in message.commits if c.finish_reason != FinishReason.RUNNING)
                for session_id in (*message.closes, *ended):
                    self._owners.pop(session_id, None)
                self._submit(message)
                if failures:
                    outbox.fail(failures)
        except InvalidRequest as error:
            log.warning("a stream sent a frame that cannot be read: %s", error.message)
            raise
        finally:
            outbox.close()

    def _route(self, output: StepOutput) -> None:
        if not output.said:  # but how it is with the engine, which is everybody's
            for outbox in self._outboxes:
                outbox.add(output)
            return
        parts: dict[_Outbox, StepOutput] = {}

        def part_of(session_id: int) -> StepOutput | None:
            owner = self._owners.get(session_id)
            return None if owner is None else parts.setdefault(owner, StepOutput(load=output.load))

        for block in output.features:
            if (part := part_of(block.session_id)) is not None:
                part.features.append(block)
        for commit in output.commits:
            if (part := part_of(commit.session_id)) is not None:
                part.commits.append(commit)
                if commit.finish_reason != FinishReason.RUNNING:
                    del self._owners[commit.session_id]
        for proposal in output.proposals:
            if (part := part_of(proposal.session_id)) is not None:
                part.proposals.append(proposal)
        for failure in output.failures:
            if (part := part_of(failure.session_id)) is not None:
                part.failures.append(failure)
                del self._owners[failure.session_id]
        for outbox, part in parts.items():
            outbox.add(part)
