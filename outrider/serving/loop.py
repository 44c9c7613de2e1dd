"""The engine loop: one thread that alone owns the device, the pages and the sessions.

    1. take every message that has arrived; wait for one if the engine is idle, or while it waits for draft tokens
    2. pass it to the engine: open, close, receive
    3. let the engine take a step
    4. publish the step's output: at once if it is urgent, else coalesced with that of later steps

The network thread uses two calls: `submit` and the `publish` callback. The `inbox` watches connections that the engine
thread reads and writes itself. Work that is not about sessions, such as new weights, is done by `call`, between two
steps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from outrider.errors import EngineFault, OutriderError, Unavailable
from outrider.process.cpu_affinity import run_compute_on
from outrider.serving.features import FeatureBlock
from outrider.serving.inbox import Inbox
from outrider.serving.messages import EngineLoad, Message, OpenSession, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, Proposal

log = logging.getLogger(__name__)

Result = TypeVar("Result")
# Returns a context with descriptors, one of which becomes readable once a message arrives.
MessageWatch = Callable[[], AbstractContextManager[Sequence[int]]]

_CALL_FACTOR = 10.0  # times the limit of a step that other work may take, such as copying a whole model's weights
AUDIT_SECONDS = 0.5  # of idleness before the pages are audited; an audit of the pages takes longer than many steps


class Engine(ABC):
    """An engine that the loop drives. Called from one thread only; unknown sessions are ignored.

    message_files: for steps that end early when a message arrives; set by the loop
    """

    message_files: MessageWatch = staticmethod(lambda: nullcontext(()))

    @abstractmethod
    def open(self, request: OpenSession) -> None:
        """Open a session, replacing one with the same id. Raises OutriderError for a request that cannot be served."""

    @abstractmethod
    def close(self, session_id: int) -> None:
        """Remove a session and free its pages."""

    @abstractmethod
    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        """Take proposals of the draft service, or commits of the target."""

    def receive_features(self, blocks: Sequence[FeatureBlock]) -> None:  # noqa: B027  (most engines need none)
        """Take hidden states of the target. The commits of their tokens were received before."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """True if a step would have nothing to do until a message arrives."""

    @property
    def draft_wait(self) -> float:
        """Seconds for which the next step is still held for messages; read again after each message."""
        return 0.0

    @property
    def coalesce_seconds(self) -> float:
        """Coalescing window after an output was published, in seconds."""
        return 0.0

    @abstractmethod
    def step(self) -> StepOutput:
        """Take one step."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """The present load: sessions and pages."""

    @abstractmethod
    def check(self) -> None:
        """Audit the pages. Raises EngineFault."""


class _Call:
    """Work for the engine thread, and the future of its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        """Do the work. Raises EngineFault and any error that is no OutriderError: the engine cannot go on then."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._work())
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, EngineFault) or not isinstance(error, OutriderError):
                raise

    def refuse(self) -> None:
        """Fail the future, because the engine has stopped."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(Unavailable("the engine has stopped; retry once the service is back"))


class Arrival(NamedTuple):
    """A stream's message. admit: returns what the engine takes of it, called when its turn has come, because the
    stream may have ended by then."""

    message: Message
    admit: Callable[[Message], Message]


class Heart:
    """Since when the engine has been at its present work. The engine thread beats; any thread may read."""

    def __init__(self) -> None:
        self._since: tuple[float, float] | None = None  # when it began, by time.monotonic, and how long it may take

    def begin(self, factor: float = 1.0) -> None:
        """Work begins. factor: of the time that a step may take."""
        self._since = time.monotonic(), factor

    def rest(self) -> None:
        """The engine waits for messages."""
        self._since = None

    def late(self, limit: float) -> float | None:
        """Seconds since the present work began, if that is longer than it may take. limit: for a step, in seconds."""
        since = self._since
        if since is None:
            return None
        seconds = time.monotonic() - since[0]
        return seconds if seconds > limit * since[1] else None


class EngineLoop:
    """Runs an engine in a thread of its own. fault: the error that ended the engine, or None."""

    engine: Engine
    _publish: Callable[[StepOutput], None]

    def __init__(
        self,
        on_fault: Callable[[BaseException], None],
        cores: Sequence[int] | None = None,
        audit_seconds: float = AUDIT_SECONDS,
    ) -> None:
        """on_fault: called once, in the engine thread, if the engine fails. cores: CPU cores of the engine thread.

        audit_seconds: idle time before the pages are audited
        """
        self._audit_seconds = audit_seconds
        self._cores = cores
        self.fault: BaseException | None = None
        self._on_fault = on_fault
        self._audited = False  # since the engine became idle
        self._ended = False
        self._spent = 0.0  # seconds in steps since the last one with output
        self._held: StepOutput | None = None  # coalesced output that is not published yet
        self._last_load = EngineLoad()  # the load that was published last
        self._published_at = -math.inf  # when, by the clock of time.perf_counter
        self._heart = Heart()
        self.inbox: Inbox[Message | Arrival | _Call | None] = Inbox()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, engine: Engine, publish: Callable[[StepOutput], None]) -> None:
        """Start the thread. Messages may have been submitted before.

        publish: called with the output of steps, and with the load alone once the engine is idle
        """
        self.engine = engine
        engine.message_files = self.inbox.message_files
        self._publish = publish
        self._thread.start()

    def submit(self, message: Message | Arrival, *, interrupts: bool = True) -> None:
        """Pass a message to the engine. Any thread may call.

        interrupts: a step that watches for messages ends early for it
        """
        self.inbox.put(message, interrupts=interrupts)

    def call(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the engine thread do some work between two steps. Any thread may call.

        The future fails with the error that the work raises. EngineFault, and any error that is no OutriderError, ends
        the engine.
        """
        call = _Call(work)
        self.inbox.put(call)
        if self._ended:  # the thread may have read its last message
            self._refuse_calls()
        return call.future

    def late(self, limit: float) -> float | None:
        """Seconds since the engine's present work began, if that is longer than it may take. Any thread may call.

        limit: for a step, in seconds; other work may take longer
        """
        return self._heart.late(limit) if self._thread.is_alive() else None

    def stop(self, timeout: float = 10.0) -> None:
        """End the thread after its present step. timeout: maximum wait, in seconds."""
        self.inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        if self._cores is not None:
            run_compute_on(self._cores)
        self.inbox.open()
        try:
            while self._take_messages():
                if not self.engine.idle:
                    self._heart.begin()
                    self._step()
        except BaseException as error:
            log.exception("the engine failed, all its sessions end")
            self.fault = error
            self._on_fault(error)
        finally:
            self._ended = True
            self.inbox.close()
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        while True:
            try:
                message = self.inbox.get()
            except queue.Empty:
                return
            if isinstance(message, _Call):
                message.refuse()

    def _step(self) -> None:
        start = time.perf_counter()
        output = self.engine.step()
        self._spent += time.perf_counter() - start
        if output.has_output:
            output.load = replace(output.load, step_microseconds=int(self._spent * 1e6 / output.steps))
            self._spent = 0.0
            self._coalesce(output)
        if self._held is not None and (self._held.urgent or self._overdue()):
            self._publish_held()

    def _coalesce(self, output: StepOutput) -> None:
        if self._held is not None and self._held.load.weight_version == output.load.weight_version:
            self._held.extend(output)
        else:
            self._publish_held()
            self._held = output

    def _overdue(self) -> bool:
        return time.perf_counter() - self._published_at >= self.engine.coalesce_seconds

    def _publish_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._publish_now(held)

    def _publish_now(self, output: StepOutput) -> None:
        self._last_load, self._published_at = output.load, time.perf_counter()
        self._publish(output)

    def _publish_idle_load(self) -> None:
        """Publish the load of an idle engine: sessions may have ended after the last step, and streams have begun."""
        load = replace(self.engine.load(), step_microseconds=self._last_load.step_microseconds)
        self._publish_now(StepOutput(load=load))

    def _take_messages(self) -> bool:
        """Handle the messages in the inbox, waiting for one if need be. Returns False once `stop` was called."""
        while True:
            idle = self.engine.idle
            if idle:
                self._publish_held()
            self._audited = self._audited and idle
            self._heart.rest()
            try:
                message = self._next_message(idle)
            except queue.Empty:
                self._heart.begin()
                if not idle:
                    return True
                self.engine.check()
                self._audited = True
                self._publish_idle_load()
                continue
            if message is None:
                return False
            self._audited = False
            self._heart.begin(_CALL_FACTOR if isinstance(message, _Call) else 1.0)
            if isinstance(message, _Call):
                message.run()
            else:
                self._handle(message.admit(message.message) if isinstance(message, Arrival) else message)

    def _next_message(self, idle: bool) -> Message | Arrival | _Call | None:
        """The next message. Raises queue.Empty if none arrives in the time that the engine can wait."""
        if not idle:
            return self.inbox.get(self.engine.draft_wait)
        return self.inbox.get(None if self._audited else self._audit_seconds)

    def _handle(self, message: Message) -> None:
        failures: list[SessionFailure] = []
        for request in message.opens:
            try:
                self.engine.open(request)
                continue
            except EngineFault:
                raise
            except OutriderError as error:
                why: OutriderError = error
            except Exception:  # a bug that one request triggers must not end the others
                log.exception("session %d cannot be opened", request.session_id)
                why = EngineFault("the service failed to open the session; see its log")
            self.engine.close(request.session_id)  # also the session that it was to replace
            failures.append(SessionFailure(request.session_id, why))
        if message.closes:
            self._close(message)
        if message.proposals or message.commits:
            self.engine.receive(message.proposals, message.commits)
        if message.features:
            self.engine.receive_features(message.features)
        if failures:
            self._publish_now(StepOutput(failures=failures, load=self.engine.load()))

    def _close(self, message: Message) -> None:
        """Close sessions, after the commits of the same frame, which online learning reads."""
        closing = set(message.closes)
        if last := [commit for commit in message.commits if commit.session_id in closing]:
            self.engine.receive((), last)
        for session_id in message.closes:
            self.engine.close(session_id)
