"""What an engine's streams have yet to say, and to which of them a step's output goes."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.serving.features import BACKLOG_BYTES, FeatureBlock, cut
from outrider.serving.messages import Message, SessionFailure, StepOutput
from outrider.speculation.proposal import Commit, FinishReason

log = logging.getLogger(__name__)

_TOLD_BYTES = 16 << 20  # of log-probabilities in a frame with more than one commit: frames have a bound


class Outbox:
    """What a stream has yet to say: a frame for each label of the weights that it was computed with."""

    def __init__(self, ready: Callable[[], None]) -> None:
        """ready: called whenever there is something to take."""
        self._frames = deque([StepOutput()])
        self._features: list[FeatureBlock] = []  # they go behind all commits
        self._backlog = 0  # bytes of features
        self._ready = ready
        self.full = False  # there is something to take

    def add(self, output: StepOutput) -> None:
        """Add what a step says."""
        last = self._frames[-1]
        if last.load.weight_version not in ("", output.load.weight_version):
            last = StepOutput()
            self._frames.append(last)
        last.extend(replace(output, features=[]))  # they have a limit
        for block in output.features:
            if self._backlog + block.rows.nbytes <= BACKLOG_BYTES:
                self._keep(block)
                continue
            log.warning("a peer is too slow for its features; those of session %d are dropped", block.session_id)
            if block.first == 0:
                # By it a reader knows the beginning of a session that was opened anew, and sees the gap behind it.
                self._keep(replace(block, rows=block.rows[:1].copy()))
        self._fill()

    def _keep(self, block: FeatureBlock) -> None:
        self._features.append(block)
        self._backlog += block.rows.nbytes

    def fail(self, failures: Sequence[SessionFailure]) -> None:
        """Add failures that no step has told."""
        self._frames[-1].failures += failures
        self._fill()

    def _fill(self) -> None:
        self.full = True
        self._ready()

    def take(self) -> StepOutput:
        """The next frame's content. Many features take several frames, and so do many log-probabilities."""
        output = self._frames.popleft()
        if later := _behind(output.commits):
            self._frames.appendleft(replace(output, commits=later))
            return StepOutput(commits=output.commits[: -len(later)], load=output.load)
        if not self._frames:
            output.features, self._features = cut(self._features)
            self._backlog -= sum(block.rows.nbytes for block in output.features)
            self._frames.append(StepOutput(load=output.load))
            self.full = bool(self._features)
        return output


def _behind(commits: list[Commit]) -> list[Commit]:
    """Commits that have to wait for the next frame, as those before them fill one."""
    size = 0
    for place, commit in enumerate(commits):
        for told in (commit.logprobs, commit.prompt_logprobs):
            size += told.nbytes if told is not None else 0
        if place and size > _TOLD_BYTES:
            return commits[place:]
    return []


class Routes:
    """Which stream owns which session. One owner, the thread that writes the streams."""

    def __init__(self) -> None:
        self._owners: dict[int, Outbox] = {}
        self._outboxes: set[Outbox] = set()

    def __len__(self) -> int:
        """How many streams there are."""
        return len(self._outboxes)

    def enter(self, outbox: Outbox) -> None:
        """A stream begins."""
        self._outboxes.add(outbox)

    def leave(self, outbox: Outbox) -> list[int]:
        """A stream has ended. Returns the sessions that it leaves behind."""
        self._outboxes.discard(outbox)
        orphans = [session_id for session_id, owner in self._owners.items() if owner is outbox]
        for session_id in orphans:
            del self._owners[session_id]
        if orphans:
            log.info("a stream ended; its %d sessions are closed", len(orphans))
        return orphans

    def note(self, message: Message, outbox: Outbox) -> None:
        """A stream has sent a message: sessions begin and end."""
        for request in message.opens:
            self._owners[request.session_id] = outbox
        # A draft is told of a session's end by its last commit.
        ended = (c.session_id for c in message.commits if c.finish_reason != FinishReason.RUNNING)
        for session_id in (*message.closes, *ended):
            self._owners.pop(session_id, None)

    def route(self, output: StepOutput) -> None:
        """Hand what a step says to the streams whose sessions it is about; what is about no session of theirs is left
        out, and a load alone is everybody's.
        """
        if not output.said:
            for outbox in self._outboxes:
                outbox.add(output)
            return
        for outbox, part in self._parts(output).items():
            outbox.add(part)

    def _parts(self, output: StepOutput) -> dict[Outbox, StepOutput]:
        parts: dict[Outbox, StepOutput] = {}

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
        return parts
