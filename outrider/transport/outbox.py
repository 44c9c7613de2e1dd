"""Unsent output of an engine's streams, and the routing of a step's output to them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from outrider.errors import Unavailable
from outrider.serving.features import BACKLOG_BYTES, FeatureBlock, cut
from outrider.serving.messages import EngineLoad, Message, OpenSession, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason

log = logging.getLogger(__name__)

_FOREIGN = "another stream has a session of this id"
_MAX_LOGPROB_BYTES = 16 << 20  # of log-probabilities in a frame with several commits: the size of a frame is limited


class Outbox:
    """Unsent output of a stream: one frame for each version of the weights."""

    def __init__(self, peer: str = "") -> None:
        """peer: the stream's peer calls itself by this secret name."""
        self.peer = peer
        self._frames = deque([StepOutput()])
        self._features: list[FeatureBlock] = []  # sent after all commits
        self._backlog = 0  # bytes of features that are not sent yet
        self.full = False  # there is output to take

    @property
    def load(self) -> EngineLoad:
        """The engine's load that the peer has, or gets with the next frame."""
        return self._frames[-1].load

    def add(self, output: StepOutput) -> None:
        """Add a step's output."""
        last = self._frames[-1]
        if last.load.weight_version not in ("", output.load.weight_version):
            last = StepOutput()
            self._frames.append(last)
        last.extend(replace(output, features=[]))  # features have a limit of their own
        for block in output.features:
            if self._backlog + block.rows.nbytes <= BACKLOG_BYTES:
                self._keep_features(block)
                continue
            log.warning("features of session %d are dropped, because the peer reads too slowly", block.session_id)
            if block.first == 0:
                # The first row marks a session that was opened again, so that the reader sees the gap after it.
                self._keep_features(replace(block, rows=block.rows[:1].copy()))
        self.full = True

    def _keep_features(self, block: FeatureBlock) -> None:
        self._features.append(block)
        self._backlog += block.rows.nbytes

    def fail(self, failures: Sequence[SessionFailure]) -> None:
        """Add failures that are not part of a step's output."""
        self._frames[-1].failures += failures
        self.full = True

    @property
    def unsent_features(self) -> Sequence[FeatureBlock]:
        """Features that no frame has taken yet."""
        return self._features

    def take(self) -> StepOutput:
        """The content of the next frame. Many features, or many log-probabilities, are split over several frames."""
        output = self._frames.popleft()
        if later := _deferred(output.commits):
            self._frames.appendleft(replace(output, commits=later))
            return StepOutput(commits=output.commits[: -len(later)], load=output.load)
        if not self._frames:
            output.features, self._features = cut(self._features)
            self._backlog -= sum(block.rows.nbytes for block in output.features)
            self._frames.append(StepOutput(load=output.load))
            self.full = bool(self._features)
        return output


def _deferred(commits: list[Commit]) -> list[Commit]:
    """Commits that do not fit into this frame because of the log-probabilities before them."""
    size = 0
    for place, commit in enumerate(commits):
        for logprobs in (commit.logprobs, commit.prompt_logprobs):
            size += logprobs.nbytes if logprobs is not None else 0
        if place and size > _MAX_LOGPROB_BYTES:
            return commits[place:]
    return []


class Routes:
    """The stream that owns each session: no other stream opens it, feeds it, closes it or gets its output.

    Used only by the thread that writes the streams.
    """

    def __init__(self) -> None:
        self._owners: dict[int, Outbox] = {}
        self._outboxes: set[Outbox] = set()

    def __len__(self) -> int:
        """Number of streams."""
        return len(self._outboxes)

    @property
    def sessions(self) -> int:
        """Number of sessions. Any thread may ask."""
        return len(self._owners)

    def enter(self, outbox: Outbox) -> None:
        """Add a stream."""
        self._outboxes.add(outbox)

    def of_peer(self, peer: str) -> list[Outbox]:
        """The streams of a peer; none of one without a name."""
        return [outbox for outbox in self._outboxes if peer and outbox.peer == peer]

    def leave(self, outbox: Outbox) -> list[int]:
        """Remove a stream. Returns the ids of the sessions that it owned."""
        self._outboxes.discard(outbox)
        orphans = [session_id for session_id, owner in self._owners.items() if owner is outbox]
        for session_id in orphans:
            del self._owners[session_id]
        if orphans:
            log.info("a stream ended, %d sessions are closed", len(orphans))
        return orphans

    def admit(self, message: Message, outbox: Outbox) -> tuple[Message, list[SessionFailure]]:
        """The parts of a stream's message that concern its own sessions, and failures of sessions that are not its own.

        Records the sessions that the message opens and ends. Messages about sessions that have ended are dropped.
        """
        failures: list[SessionFailure] = []
        if foreign := [request.session_id for request in message.opens if not self._may_open(request, outbox)]:
            log.warning("a stream tried to open %d sessions of other streams", len(foreign))
            failures = [SessionFailure(session_id, Unavailable(_FOREIGN)) for session_id in foreign]
            message = replace(message, opens=[one for one in message.opens if one.session_id not in foreign])
        owners = self._owners
        for request in message.opens:
            owners[request.session_id] = outbox
        if not (
            all(owners.get(session_id) is outbox for session_id in message.closes)
            and all(owners.get(one.session_id) is outbox for one in message.proposals)
            and all(owners.get(one.session_id) is outbox for one in message.commits)
            and all(owners.get(one.session_id) is outbox for one in message.features)
        ):
            message = self._own_part(message, outbox)
        # A draft service receives a session's end with its last commit.
        ended = (c.session_id for c in message.commits if c.finish_reason != FinishReason.RUNNING)
        for session_id in (*message.closes, *ended):
            owners.pop(session_id, None)
        return message, failures

    def _may_open(self, request: OpenSession, outbox: Outbox) -> bool:
        """True if no other stream owns the session."""
        return self._owners.get(request.session_id, outbox) is outbox

    def _own_part(self, message: Message, outbox: Outbox) -> Message:
        owners = self._owners
        return replace(
            message,
            closes=[session_id for session_id in message.closes if owners.get(session_id) is outbox],
            proposals=[one for one in message.proposals if owners.get(one.session_id) is outbox],
            commits=[one for one in message.commits if owners.get(one.session_id) is outbox],
            features=[one for one in message.features if owners.get(one.session_id) is outbox],
        )

    def route(self, output: StepOutput) -> None:
        """Give a step's output to the streams that own its sessions; output of unowned sessions is dropped. Output that
        has only the engine's load goes to all streams that have another one.
        """
        if not output.has_output:
            for outbox in self._outboxes:
                if outbox.load != output.load:
                    outbox.add(output)
            return
        for outbox, part in self._parts(output).items():
            outbox.add(part)

    def _parts(self, output: StepOutput) -> dict[Outbox, StepOutput]:
        owners = self._owners
        parts: dict[Outbox, StepOutput] = {}
        for kind in ("features", "commits", "proposals", "failures"):
            for one in getattr(output, kind):
                owner = owners.get(one.session_id)
                if owner is None:
                    continue
                if owner not in parts:
                    parts[owner] = StepOutput(load=output.load)
                getattr(parts[owner], kind).append(one)
        ended = (one.session_id for one in output.commits if one.finish_reason != FinishReason.RUNNING)
        for session_id in (*ended, *(failure.session_id for failure in output.failures)):
            owners.pop(session_id, None)
        return parts
