"""Periodic log lines about a target's steps, in the words of SGLang's log, which people search for.

    Prefill batch. #new-seq, #new-token, #cached-token, cache hit rate, token usage, #running-req, #queue-req
    Decode batch. #running-req, #token, token usage, accept len, accept rate, gen throughput (token/s), #queue-req

A step adds to a few counters; a line is written once every `interval` steps, and the first prompts after a pause at
once. A target without requests writes none.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.serving.scheduler import Scheduler
from outrider.speculation.proposal import Commit
from services.target.step.batch import SessionWork

log = logging.getLogger(__name__)


@dataclass
class _Prompts:
    """Prompts since the last line about them: sequences that began, tokens computed, tokens taken from the cache."""

    sequences: int = 0
    tokens: int = 0
    cached: int = 0


@dataclass
class _Decoding:
    """Decoding since the last line about it.

    steps: of the model; rows: steps of all sessions together; tokens: committed; verified, accepted: draft tokens
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0


class StepLog:
    """Counts steps and writes the lines. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, interval: int) -> None:
        """interval: decoding steps between two lines."""
        self._scheduler, self._interval = scheduler, interval
        self._prompts, self._decoding = _Prompts(), _Decoding()
        self._since_prompts = interval  # steps since the last line about prompts
        self._began: float | None = None  # when the present count of decoded tokens began, by the clock

    def pause(self) -> None:
        """Write what is left about prompts, and begin anew: the target has nothing to do."""
        self._write_prompts()
        self._decoding, self._began, self._since_prompts = _Decoding(), None, self._interval

    def note(
        self, works: Sequence[SessionWork], commits: Sequence[Commit], steps: int, started: float, ended: float
    ) -> None:
        """Count a settled step. steps: of the model; started, ended: by the clock, in seconds."""
        decodes = False
        for work in works:
            chunk, session = work.chunk, work.chunk.session
            if len(chunk) == 1 and chunk.start >= session.opened_length:
                decodes = True
                continue
            self._prompts.tokens += len(chunk)
            if chunk.start == session.record.cached_tokens:
                self._prompts.sequences += 1
                self._prompts.cached += session.record.cached_tokens
        self._since_prompts += steps
        if self._prompts.tokens and self._since_prompts >= self._interval:
            self._write_prompts()
        if decodes:
            self._began = started if self._began is None else self._began
            self._count(commits, steps)
            if self._decoding.steps >= self._interval:
                self._write_decoding(ended - self._began)
                self._began = ended

    def _count(self, commits: Sequence[Commit], steps: int) -> None:
        count = self._decoding
        count.steps += steps
        for commit in commits:
            tokens = len(commit.tokens)
            count.tokens += tokens
            count.rows += 1 if commit.verified else tokens
            count.verified += commit.verified
            count.accepted += commit.accepted

    def _write_prompts(self) -> None:
        prompts = self._prompts
        if not prompts.tokens:
            return
        self._prompts, self._since_prompts = _Prompts(), 0
        log.info(
            "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, cache hit rate: %.2f%%, "
            "token usage: %.2f, #running-req: %d, #queue-req: %d",
            prompts.sequences, prompts.tokens, prompts.cached,
            100.0 * prompts.cached / (prompts.cached + prompts.tokens), self._usage(),
            self._scheduler.running, self._scheduler.waiting,
        )  # fmt: skip

    def _write_decoding(self, seconds: float) -> None:
        count, self._decoding = self._decoding, _Decoding()
        allocator = self._scheduler.allocator
        log.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, accept len: %.2f, accept rate: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d",
            self._scheduler.running, allocator.leased_pages * allocator.page_size, self._usage(),
            count.tokens / max(count.rows, 1), count.accepted / max(count.verified, 1),
            count.tokens / max(seconds, 1e-9), self._scheduler.waiting,
        )  # fmt: skip

    def _usage(self) -> float:
        """Part of the KV pages that sessions hold; pages that only the prefix cache keeps are free."""
        allocator = self._scheduler.allocator
        return allocator.leased_pages / allocator.total_pages
