"""Collects answers of a target, or its states of rollouts: a client of its ordinary stream, which fills the store.

    jobs ──► conversation, turn by turn ──► sessions of the stream ──► records ──► store

Sessions ignore the end-of-sequence token and are closed here after it was sampled: a session that ends by itself does
not get the states of its last step, which hold how likely the end was. States that have not arrived some time after a
session's end are given up, and the answer is cut behind the last state.

If the target is overloaded or dropped states, the request is repeated after a pause. A conversation that the target
refuses, or that fails again, is left out and counted; if all conversations fail, the run ends. If the stream breaks,
all open requests are repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from outrider import PROTOCOL_VERSION
from outrider.errors import ConfigError, EngineFault, InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.service_token import with_token
from outrider.serving.features import FeatureSpec
from outrider.serving.messages import Message, OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.text.tokenizer import Tokenizer
from outrider.tls import ClientTls, explain_tls_failure, open_channel
from outrider.transport.rpc import CHANNEL_OPTIONS
from outrider.wire import codec
from outrider.wire.features import feature_spec_to_pb, features_from_pb
from outrider.wire.v1 import target_pb2, target_pb2_grpc
from services.draft.learning.records.store import Record, Store
from services.draft.train.data.answer import RequestedAnswer
from services.draft.train.data.passages import Passages, quotes, user_turn_frame, whole_sentences
from services.draft.train.data.prompts import PromptJob, is_held_out
from services.draft.train.data.rollouts import Rollout, replay

log = logging.getLogger(__name__)

_TIMEOUT = 30.0  # seconds for the calls before the stream
_LATE_ROWS = 10.0  # seconds to wait for states after a session's end: commits overtake them, and a target may drop some
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0, 60.0, 60.0)  # seconds before an overloaded target is asked again
_MAX_FAULTS = 4  # failures in a row per concurrent session before the run ends
_MAX_FUTILE = 10_000  # prompts in a row without an answer before the run ends
_MIN_NEW = 16  # tokens that a prompt must leave room for
# Sampling of user turns that the target writes: at temperature 1 a small model soon writes nonsense, and answers alike.
_USER_TEMPERATURE, _USER_TOP_P = 0.7, 0.9


@dataclass(frozen=True)
class Limits:
    """new: tokens of an answer; length: of prompt and answer; sessions: concurrent; tokens, bytes: of all answers."""

    new: int
    length: int
    sessions: int
    tokens: int
    bytes: int


class TargetClient:
    """A client of a target. Use: `async with TargetClient(...) as client`."""

    def __init__(
        self, address: str, spec: FeatureSpec, tls: ClientTls | None = None, fingerprint: str | None = None,
        *, token: str | None = None,
    ) -> None:  # fmt: skip
        """fingerprint: of the weights that the target must have; None for any. token: of the services."""
        self.address, self.spec, self.tls, self._fingerprint, self._token = address, spec, tls, fingerprint, token
        self.info = target_pb2.GetTargetInfoResponse()
        self.row_bytes = 0
        self._sessions: dict[int, RequestedAnswer] = {}
        self._ids = itertools.count(1)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._broken: OutriderError | None = None

    async def __aenter__(self) -> TargetClient:
        if trouble := await explain_tls_failure(self.address, self.tls):
            raise ConfigError(f"the target at {self.address} {trouble}")
        self._channel = with_token(open_channel(self.address, CHANNEL_OPTIONS, self.tls), self._token)
        self.stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
        try:
            await self._shake_hands()
        except grpc.aio.AioRpcError as error:
            await self._channel.close()
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(f"the target at {self.address} refuses this training: {error.details()}") from None
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"the target at {self.address} cannot serve the drafter: {error.details()}") from None
            raise Unavailable(f"the target at {self.address} does not respond: {error.details()}") from None
        self._reader = asyncio.create_task(self.receive())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _shake_hands(self) -> None:
        self.info = await self.stub.GetTargetInfo(
            target_pb2.GetTargetInfoRequest(), timeout=_TIMEOUT, wait_for_ready=True
        )
        if self.info.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the target at {self.address} has protocol version {self.info.protocol_version}, this trainer "
                f"{PROTOCOL_VERSION}; run the same release everywhere"
            )
        found = self.info.model.fingerprint
        if self._fingerprint not in (None, found):
            raise ConfigError(
                f"the target at {self.address} has weights with fingerprint {found}, but --model-path has "
                f"{self._fingerprint}; name the checkpoint that the target serves"
            )
        files: dict[str, bytearray] = {}
        async for part in self.stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=_TIMEOUT):
            files.setdefault(part.file_name, bytearray()).extend(part.content)
        self.tokenizer = Tokenizer({name: bytes(content) for name, content in files.items()})

        async def specification() -> AsyncIterator[target_pb2.ConfigureFeaturesRequest]:
            yield target_pb2.ConfigureFeaturesRequest(spec=feature_spec_to_pb(self.spec, b""))

        answer = await self.stub.ConfigureFeatures(specification(), timeout=_TIMEOUT)
        self.row_bytes = answer.row_bytes

    # --- the stream ---

    async def receive(self) -> None:
        """Read frames until the stream breaks; every open request then fails and is repeated by its caller."""
        call = self.stub.Verify()
        sender = asyncio.create_task(self._send(call))
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self.handle_frame(frame)
            raise Unavailable(f"the target at {self.address} ended the stream")
        except grpc.aio.AioRpcError as error:
            self._fail(Unavailable(f"the stream to the target at {self.address} broke: {error.details()}"))
        except Unavailable as error:
            self._fail(error)
        except Exception as error:  # a frame that no reader understands
            log.exception("a frame of the target at %s cannot be read", self.address)
            self._fail(Unavailable(f"the target at {self.address} sent a frame that cannot be read: {error}"))
        finally:
            sender.cancel()
            call.cancel()

    async def _send(self, call: Any) -> None:
        while True:
            messages = [await self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get_nowait())
            frame = Message(
                opens=[request for message in messages for request in message.opens],
                closes=[number for message in messages for number in message.closes],
            )
            await call.write(codec.verify_request_to_pb(frame))

    def _fail(self, error: OutriderError) -> None:
        self._broken = error
        for session in self._sessions.values():
            if not session.done.done():
                session.done.set_exception(error)

    def handle_frame(self, frame: target_pb2.VerifyResponse) -> None:
        """Apply a frame of the stream. Raises Unavailable if the target has new weights."""
        if frame.load.weight_version not in ("", self.info.weight_version):
            raise Unavailable(f"the target at {self.address} has new weights, {frame.load.weight_version!r}")
        self._take_tokens(frame)
        self._take_states(frame)
        for message in frame.errors:
            failure = codec.failure_from_pb(message)
            if (session := self._sessions.get(failure.session_id)) is not None and not session.done.done():
                session.done.set_exception(failure.error)
        for session in self._sessions.values():
            if session.due is not None and session.row_count >= session.due:
                session.resolve()

    def _take_tokens(self, frame: target_pb2.VerifyResponse) -> None:
        bases: dict[int, int] = {}  # tokens of each session before the frame
        for number, base, tokens, _, _, _, finish, _, _ in codec.commit_rows(frame.commits):
            session = self._sessions.get(number)
            if session is None:
                continue
            first, waits = bases.setdefault(number, base), session.ended
            if not waits:
                assert base == len(session.tokens), "commits of a session are contiguous"
                session.add(tokens, self.info.eos_token_ids)
            if finish:
                # States of the last step are not sent; those of earlier steps in this frame may be.
                session.due = session.due if waits else first - 1
                asyncio.get_running_loop().call_later(_LATE_ROWS, session.resolve)

    def _take_states(self, frame: target_pb2.VerifyResponse) -> None:
        for block in features_from_pb(frame.features):
            if (session := self._sessions.get(block.session_id)) is None:
                continue
            if block.first == session.row_count:
                session.rows.append(block.rows)
                session.row_count += len(block.rows)
            elif block.first > session.row_count and not session.done.done():
                session.done.set_exception(Overloaded("hidden states of an answer were dropped on the way"))

    async def write(self, prompt: Sequence[int], sampling: SamplingParams, new: int) -> tuple[NDArray[np.uint32], Any]:
        """Generate an answer. Returns all tokens, [n] uint32, and their states, [n - 1, row bytes] uint8.

        The answer ends where the states do. Raises OutriderError if the session fails, Overloaded if states were
        dropped on the way, and Unavailable if the stream is broken.
        """
        if self._broken is not None:
            raise self._broken
        number = next(self._ids)
        session = self._sessions[number] = RequestedAnswer(list(prompt), len(prompt))
        stop = StopConditions(new, ignore_eos=True)
        tokens = np.array(prompt, np.uint32)
        request = OpenSession(
            number, tokens, len(prompt), sampling, stop, feature_spec=self.spec.id(b""), drafting_paused=True
        )
        self._outbox.put_nowait(Message(opens=[request]))
        try:
            await session.done
        finally:
            del self._sessions[number]
            self._outbox.put_nowait(Message(closes=[number]))
        rows = np.concatenate(session.rows) if session.rows else np.zeros((0, self.row_bytes), np.uint8)
        count = min(len(rows), len(session.tokens) - 1)
        return np.array(session.tokens[: count + 1], np.uint32), rows[:count]


class _NoUserTurn(InvalidRequest):
    """The conversation has no user turn."""


class Collector:
    """Fills a store with the answers that a target generates."""

    def __init__(self, client: TargetClient, store: Store, limits: Limits, held_out: float) -> None:
        """held_out: fraction of the conversations that are kept for evaluation."""
        self._client, self._store, self._limits, self._held_out = client, store, limits, held_out
        self._passages = Passages(store, client.tokenizer)
        self._futile = self._faults = 0  # conversations in a row without an answer; failed ones in a row
        self.left_out: Counter[str] = Counter()  # conversations by reason
        self.last_reason = ""  # error message of the last conversation that was refused or failed

    async def run(self, jobs: Iterator[PromptJob]) -> None:
        """Generate until there is enough, or no job is left.

        Raises OutriderError if the target is lost, or if no prompt leads to an answer.
        """
        workers = [asyncio.create_task(self._work(jobs)) for _ in range(self._limits.sessions)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    @property
    def enough(self) -> bool:
        """True if the store holds the wanted number of tokens, or its maximum of bytes."""
        return self._store.token_count >= self._limits.tokens or self._store.bytes >= self._limits.bytes

    async def _work(self, jobs: Iterator[PromptJob]) -> None:
        while not self.enough and (job := next(jobs, None)) is not None:
            if job.key in self._store.jobs:
                continue
            try:
                records = [record async for record in self._conversation(job)]
            except _NoUserTurn:
                await self._skip("without a turn of the user")
            except InvalidRequest as error:
                await self._skip("refused", error)
            except (Overloaded, EngineFault) as error:
                self._faults += 1
                if self._faults >= _MAX_FAULTS * self._limits.sessions:
                    raise
                await self._skip("failed", error)
            else:
                if records:
                    self._store.add(job.key, records)
                    self._futile = self._faults = 0
                else:
                    await self._skip("too long or empty")

    async def _skip(self, kind: str, error: OutriderError | None = None) -> None:
        """Count a conversation without an answer. Raises InvalidRequest after too many in a row."""
        self.left_out[kind] += 1
        self._futile += 1
        if error is not None:
            self.last_reason = error.message
            log.debug("a conversation is left out: %s", error.message)
        if self._futile >= _MAX_FUTILE:
            raise InvalidRequest(
                f"the last {self._futile} prompts led to no answer: {self.left_out_summary}; see --data, --max-length "
                "and --free-openings"
            )
        await asyncio.sleep(0)  # a rejected conversation need not have awaited the target; let other tasks run

    @property
    def left_out_summary(self) -> str:
        """Conversations that were left out, by reason, as text."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.left_out.items())
        return f"{counts} (the last one: {self.last_reason})" if self.last_reason else counts

    async def _conversation(self, job: PromptJob) -> AsyncIterator[Record]:
        conversation, tokenizer = job.conversation, self._client.tokenizer
        if conversation.rollout is not None:
            if (replayed := await replay(conversation.rollout, self._limits.length, self._write)) is not None:
                yield self._replayed(job, conversation.rollout, *replayed)
            return
        if conversation.text:
            async for record in self._answer(job, tokenizer.encode(conversation.text)):
                yield record
            return
        quoting = quotes(conversation.opening)
        if quoting:
            turns: tuple[str, ...] = (self._quoting_turn(job),)
        else:
            turns = (await self._user_turn(job),) if conversation.free else conversation.turns
        messages = [{"role": role, "content": content} for role, content in conversation.messages]
        for turn in turns:
            messages.append({"role": "user", "content": turn})
            prompt, answer = tokenizer.encode_chat(messages), ""
            own = conversation.free and not quoting  # the target wrote the user turn, so it is learned too
            first = len(self._opening(conversation.opening)) if own else len(prompt)
            async for record in self._answer(job, prompt, first):
                yield record
                answer = tokenizer.decode(record.tokens[len(prompt) :].tolist())
            if not answer.strip():
                return
            messages.append({"role": "assistant", "content": answer})

    def _replayed(
        self, job: PromptJob, rollout: Rollout, tokens: NDArray[np.uint32], rows: NDArray[np.uint8]
    ) -> Record:
        """The record of a rollout, sampled as its file says."""
        held_out = is_held_out(job.conversation.name, self._held_out) if rollout.held_out is None else rollout.held_out
        first = rollout.prompt if rollout.first is None else rollout.first
        temperature = job.temperature if rollout.temperature is None else rollout.temperature
        seed = job.seed if rollout.seed is None else rollout.seed
        return Record(tokens, rows, rollout.prompt, first, temperature, seed, held_out)

    async def _answer(self, job: PromptJob, prompt: list[int], first: int | None = None) -> AsyncIterator[Record]:
        """The answer to a prompt; nothing without room for one. first: index of the first token to learn."""
        room = min(self._limits.new, self._limits.length - len(prompt))
        if room < _MIN_NEW:
            return
        sampling = SamplingParams(temperature=job.temperature, seed=job.seed)
        tokens, rows = await self._write(prompt, sampling, room)
        if len(tokens) > len(prompt) + 1:
            held_out = is_held_out(job.conversation.name, self._held_out)
            first = len(prompt) if first is None else first
            yield Record(tokens, rows, len(prompt), first, job.temperature, job.seed, held_out)

    async def _write(self, prompt: list[int], sampling: SamplingParams, new: int) -> tuple[NDArray[np.uint32], Any]:
        """As TargetClient.write, repeated after pauses while the target is overloaded."""
        for pause in _PAUSES:
            try:
                return await self._client.write(prompt, sampling, new)
            except Overloaded as error:
                if self.enough:
                    raise
                log.debug("the request is repeated in %g s: %s", pause, error.message)
                await asyncio.sleep(pause)
        return await self._client.write(prompt, sampling, new)

    def _opening(self, words: str) -> list[int]:
        """The template's text before the first user turn, and the first words of that turn, as token ids."""
        tokenizer = self._client.tokenizer
        return tokenizer.encode_rendered(user_turn_frame(tokenizer)[0] + words)

    def _quoting_turn(self, job: PromptJob) -> str:
        """A user turn that quotes earlier answers. Raises _NoUserTurn if there are too few answers."""
        text = self._passages.fill(job.conversation.opening, job.seed ^ 2)
        if not text:
            raise _NoUserTurn("there are too few answers to quote from")
        return text

    async def _user_turn(self, job: PromptJob) -> str:
        """A user turn that the target writes, in whole sentences. Raises _NoUserTurn if it is empty."""
        tokenizer = self._client.tokenizer
        opening = job.conversation.opening
        prompt = self._opening(opening)
        sampling = SamplingParams(temperature=_USER_TEMPERATURE, top_p=_USER_TOP_P, seed=job.seed ^ 1)
        tokens, _ = await self._write(prompt, sampling, self._limits.new)
        text = tokenizer.decode(tokens[len(prompt) :].tolist())
        if int(tokens[-1]) not in self._client.info.eos_token_ids:
            text = whole_sentences(text)
        if not text.strip():
            raise _NoUserTurn("the user's turn is empty")
        return (opening + text).strip()
