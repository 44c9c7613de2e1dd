"""Lets a target write: a client of its ordinary stream that keeps the tokens and the hidden states of every answer.

    jobs ──► a conversation, turn by turn ──► sessions of the stream ──► records ──► store

Sessions ignore the end-of-sequence token and are closed here once it has come: a session that ends by itself is not
sent the states of its last step, and these tell how likely the end was. States that have not come a while after a
session's end are waited for no longer, and the answer ends where they do.

A target without room, or one that dropped states on the way, is asked again after a while. A conversation that it
refuses, or whose session failed all the same, is left out and counted; if that happens to all, the run ends. If the
stream breaks, all that was under way is asked again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from outrider import PROTOCOL_VERSION
from outrider.errors import ConfigError, EngineFault, InvalidRequest, OutriderError, Overloaded, Unavailable
from outrider.serving.features import FeatureSpec
from outrider.serving.messages import Message, OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions
from outrider.text.tokenizer import Tokenizer
from outrider.tls import ClientTls, explain_tls_failure, open_channel
from outrider.transport.rpc import CHANNEL_OPTIONS
from outrider.wire import codec
from outrider.wire.features import feature_spec_to_pb, features_from_pb
from outrider.wire.v1 import target_pb2, target_pb2_grpc
from services.draft.learning.store import Record, Store
from services.draft.train.data.passages import Passages, quotes, user_turn_frame, whole_sentences
from services.draft.train.data.prompts import Job, is_held_out

log = logging.getLogger(__name__)

_TIMEOUT = 30.0  # seconds for the calls before the stream
_LATE_ROWS = 10.0  # seconds for states that a session's end has overtaken: commits go first, and a target may drop some
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 60.0, 60.0, 60.0)  # seconds before who has no room is asked again
_FAULTS = 4  # a session that is written at a time, in a row: then it is no matter of single ones
_FUTILE = 10_000  # prompts, in a row, that lead to nothing: then none will
_LEAST_NEW = 16  # tokens that a prompt must leave room for
# Of what the target says in the user's place: a small model at temperature 1 soon talks nonsense, and answers in kind.
_USER_TEMPERATURE, _USER_TOP_P = 0.7, 0.9


@dataclass(frozen=True)
class Limits:
    """new: tokens of an answer; length: of prompt and answer; sessions: at a time; tokens, bytes: of all answers."""

    new: int
    length: int
    sessions: int
    tokens: int
    bytes: int


@dataclass
class _Session:
    tokens: list[int]
    prompt: int
    rows: list[NDArray[np.uint8]] = field(default_factory=list)
    row_count: int = 0
    ended: bool = False  # the end-of-sequence token has come
    due: int | None = None  # states that are still to come until all have; None as long as the text goes on
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def add(self, tokens: Iterable[int], eos: Container[int]) -> None:
        """Take tokens over, up to the one that ends the answer."""
        for token in tokens:
            self.tokens.append(token)
            if token in eos:
                self.ended, self.due = True, len(self.tokens) - 1
                return

    def resolve(self) -> None:
        """The answer is what has come."""
        if not self.done.done():
            self.done.set_result(None)


class Writer:
    """A target that writes. Use: `async with Writer(...) as writer`."""

    def __init__(
        self, address: str, spec: FeatureSpec, tls: ClientTls | None = None, fingerprint: str | None = None
    ) -> None:
        """fingerprint: of the weights that it must have; None for any."""
        self.address, self.spec, self.tls, self._fingerprint = address, spec, tls, fingerprint
        self.info = target_pb2.GetTargetInfoResponse()
        self.row_bytes = 0
        self._sessions: dict[int, _Session] = {}
        self._ids = itertools.count(1)
        self._outbox: asyncio.Queue[Message] = asyncio.Queue()
        self._broken: OutriderError | None = None

    async def __aenter__(self) -> Writer:
        if trouble := await explain_tls_failure(self.address, self.tls):
            raise ConfigError(f"the target at {self.address} {trouble}")
        self._channel = open_channel(self.address, CHANNEL_OPTIONS, self.tls)
        self._stub: Any = target_pb2_grpc.TargetServiceStub(self._channel)
        try:
            await self._shake_hands()
        except grpc.aio.AioRpcError as error:
            await self._channel.close()
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise ConfigError(f"the target at {self.address} cannot serve the drafter: {error.details()}") from None
            raise Unavailable(f"the target at {self.address} does not answer: {error.details()}") from None
        self._reader = asyncio.create_task(self._listen())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def _shake_hands(self) -> None:
        self.info = await self._stub.GetTargetInfo(
            target_pb2.GetTargetInfoRequest(), timeout=_TIMEOUT, wait_for_ready=True
        )
        if self.info.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"the target at {self.address} speaks protocol version {self.info.protocol_version}, this trainer "
                f"{PROTOCOL_VERSION}; run the same release everywhere"
            )
        found = self.info.model.fingerprint
        if self._fingerprint not in (None, found):
            raise ConfigError(
                f"the target at {self.address} has weights of fingerprint {found}, those of --model-path have "
                f"{self._fingerprint}; name the checkpoint that it serves"
            )
        files: dict[str, bytearray] = {}
        async for part in self._stub.GetTokenizer(target_pb2.GetTokenizerRequest(), timeout=_TIMEOUT):
            files.setdefault(part.file_name, bytearray()).extend(part.content)
        self.tokenizer = Tokenizer({name: bytes(content) for name, content in files.items()})

        async def wish() -> AsyncIterator[target_pb2.ConfigureFeaturesRequest]:
            yield target_pb2.ConfigureFeaturesRequest(spec=feature_spec_to_pb(self.spec, b""))

        answer = await self._stub.ConfigureFeatures(wish(), timeout=_TIMEOUT)
        self.row_bytes = answer.row_bytes

    # --- the stream ---

    async def _listen(self) -> None:
        """Read frames until the stream breaks; everything under way then fails, to be asked again."""
        call = self._stub.Verify()
        writer = asyncio.create_task(self._talk(call))
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._hear(frame)
            raise Unavailable(f"the target at {self.address} ended the stream")
        except grpc.aio.AioRpcError as error:
            self._fail(Unavailable(f"the stream to the target at {self.address} broke: {error.details()}"))
        except Unavailable as error:
            self._fail(error)
        except Exception as error:  # of a frame that nobody would understand
            log.exception("a frame of the target at %s cannot be read", self.address)
            self._fail(Unavailable(f"the target at {self.address} said what cannot be read: {error}"))
        finally:
            writer.cancel()
            call.cancel()

    async def _talk(self, call: Any) -> None:
        while True:
            said = [await self._outbox.get()]
            while not self._outbox.empty():
                said.append(self._outbox.get_nowait())
            frame = Message(
                opens=[request for message in said for request in message.opens],
                closes=[number for message in said for number in message.closes],
            )
            await call.write(codec.verify_request_to_pb(frame))

    def _fail(self, error: OutriderError) -> None:
        self._broken = error
        for session in self._sessions.values():
            if not session.done.done():
                session.done.set_exception(error)

    def _hear(self, frame: target_pb2.VerifyResponse) -> None:
        if frame.load.weight_version not in ("", self.info.weight_version):
            raise Unavailable(f"the target at {self.address} has new weights, {frame.load.weight_version!r}")
        bases: dict[int, int] = {}  # tokens of each session before the frame
        for number, base, tokens, _, _, _, finish, _ in codec.commit_rows(frame.commits):
            session = self._sessions.get(number)
            if session is None:
                continue
            first, waits = bases.setdefault(number, base), session.ended
            if not waits:
                assert base == len(session.tokens), "commits of a session are contiguous"
                session.add(tokens, self.info.eos_token_ids)
            if finish:
                # Those of the last step are not sent; of this frame's, others may be.
                session.due = session.due if waits else first - 1
                asyncio.get_running_loop().call_later(_LATE_ROWS, session.resolve)
        for block in features_from_pb(frame.features):
            if (session := self._sessions.get(block.session_id)) is None:
                continue
            if block.first == session.row_count:
                session.rows.append(block.rows)
                session.row_count += len(block.rows)
            elif block.first > session.row_count and not session.done.done():
                session.done.set_exception(Overloaded("hidden states of an answer were dropped on the way"))
        for message in frame.errors:
            failure = codec.failure_from_pb(message)
            if (session := self._sessions.get(failure.session_id)) is not None and not session.done.done():
                session.done.set_exception(failure.error)
        for session in self._sessions.values():
            if session.due is not None and session.row_count >= session.due:
                session.resolve()

    async def write(self, prompt: Sequence[int], sampling: SamplingParams, new: int) -> tuple[NDArray[np.uint32], Any]:
        """What the target writes after a prompt. Returns all tokens, [n], and their states, [n - 1, row bytes] uint8.

        The text ends where the states do. Raises OutriderError if the session fails, Overloaded if states of it were
        dropped on the way, and Unavailable if the stream is broken.
        """
        if self._broken is not None:
            raise self._broken
        number = next(self._ids)
        session = self._sessions[number] = _Session(list(prompt), len(prompt))
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


class _NothingToAsk(InvalidRequest):
    """There is no turn of the user."""


class Collector:
    """Fills a store by what a writer writes. said: called with the store after every job."""

    def __init__(self, writer: Writer, store: Store, limits: Limits, held_out: float) -> None:
        """held_out: part of the conversations that are kept for the evaluation."""
        self._writer, self._store, self._limits, self._held_out = writer, store, limits, held_out
        self._passages = Passages(store, writer.tokenizer)
        self._futile = self._faults = 0  # conversations in a row that led to nothing, and that failed
        self.left_out: Counter[str] = Counter()  # by reason
        self.last_reason = ""  # what was said of the last one that was refused, or failed

    async def run(self, jobs: Iterator[Job]) -> None:
        """Write until there is enough, or no job is left.

        Raises OutriderError if the target goes away, or if nothing that it is asked leads to an answer.
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
        """True if as much was written as is wanted, or as there is room for."""
        return self._store.token_count >= self._limits.tokens or self._store.bytes >= self._limits.bytes

    async def _work(self, jobs: Iterator[Job]) -> None:
        while not self.enough and (job := next(jobs, None)) is not None:
            if job.key in self._store.jobs:
                continue
            try:
                records = [record async for record in self._conversation(job)]
            except _NothingToAsk:
                await self._leave_out("without a turn of the user")
            except InvalidRequest as error:
                await self._leave_out("refused", error)
            except (Overloaded, EngineFault) as error:
                self._faults += 1
                if self._faults >= _FAULTS * self._limits.sessions:
                    raise
                await self._leave_out("failed", error)
            else:
                if records:
                    self._store.add(job.key, records)
                    self._futile = self._faults = 0
                else:
                    await self._leave_out("too long or empty")

    async def _leave_out(self, kind: str, error: OutriderError | None = None) -> None:
        """Count a conversation that leads to nothing. Raises InvalidRequest if so many in a row have."""
        self.left_out[kind] += 1
        self._futile += 1
        if error is not None:
            self.last_reason = error.message
            log.debug("a conversation is left out: %s", error.message)
        if self._futile >= _FUTILE:
            raise InvalidRequest(
                f"the last {self._futile} prompts led to no answer: {self.left_out_in_words}; see --data, --max-length "
                "and --free-openings"
            )
        await asyncio.sleep(0)  # none of them may have waited for the target, and others want to

    @property
    def left_out_in_words(self) -> str:
        """How many conversations were left out, and why."""
        counts = ", ".join(f"{count} {kind}" for kind, count in self.left_out.items())
        return f"{counts} (the last one: {self.last_reason})" if self.last_reason else counts

    async def _conversation(self, job: Job) -> AsyncIterator[Record]:
        conversation, tokenizer = job.conversation, self._writer.tokenizer
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
            own = conversation.free and not quoting  # the target's words
            first = len(self._opening(conversation.opening)) if own else len(prompt)
            async for record in self._answer(job, prompt, first):
                yield record
                answer = tokenizer.decode(record.tokens[len(prompt) :].tolist())
            if not answer.strip():
                return
            messages.append({"role": "assistant", "content": answer})

    async def _answer(self, job: Job, prompt: list[int], first: int | None = None) -> AsyncIterator[Record]:
        """The answer to a prompt, or nothing if there is no room for one. first: token from which on to learn."""
        room = min(self._limits.new, self._limits.length - len(prompt))
        if room < _LEAST_NEW:
            return
        sampling = SamplingParams(temperature=job.temperature, seed=job.seed)
        tokens, rows = await self._write(prompt, sampling, room)
        if len(tokens) > len(prompt) + 1:
            held_out = is_held_out(job.conversation.name, self._held_out)
            first = len(prompt) if first is None else first
            yield Record(tokens, rows, len(prompt), first, job.temperature, job.seed, held_out)

    async def _write(self, prompt: list[int], sampling: SamplingParams, new: int) -> tuple[NDArray[np.uint32], Any]:
        """As of Writer, with patience."""
        for pause in _PAUSES:
            try:
                return await self._writer.write(prompt, sampling, new)
            except Overloaded as error:
                if self.enough:
                    raise
                log.debug("asked again in %g s: %s", pause, error.message)
                await asyncio.sleep(pause)
        return await self._writer.write(prompt, sampling, new)

    def _opening(self, words: str) -> list[int]:
        """What a template puts before the user's first words, and these."""
        tokenizer = self._writer.tokenizer
        return tokenizer.encode_rendered(user_turn_frame(tokenizer)[0] + words)

    def _quoting_turn(self, job: Job) -> str:
        """A user's turn about what was written before. Raises _NothingToAsk if that is too little."""
        text = self._passages.fill(job.conversation.opening, job.seed ^ 2)
        if not text:
            raise _NothingToAsk("too little was written that could be quoted")
        return text

    async def _user_turn(self, job: Job) -> str:
        """What the target says in the user's place, in whole sentences. Raises _NothingToAsk if that is nothing."""
        tokenizer = self._writer.tokenizer
        opening = job.conversation.opening
        prompt = self._opening(opening)
        sampling = SamplingParams(temperature=_USER_TEMPERATURE, top_p=_USER_TOP_P, seed=job.seed ^ 1)
        tokens, _ = await self._write(prompt, sampling, self._limits.new)
        text = tokenizer.decode(tokens[len(prompt) :].tolist())
        if int(tokens[-1]) not in self._writer.info.eos_token_ids:
            text = whole_sentences(text)
        if not text.strip():
            raise _NothingToAsk("the user's turn is empty")
        return (opening + text).strip()
