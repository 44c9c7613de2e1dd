"""Self-test of a draft: a few short answers show whether its drafters fit the target.

A draft of another model, or one whose checkpoint is read incorrectly, causes no error: the text is the target's and is
only not faster. So once a draft with a model is up, the gateway generates a few answers at temperature 0, as for a
client, and compares how many of the tokens each drafter predicted. These sessions count in no metric of requests or
tokens, and share no cached prefix and no n-grams with clients.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.orchestration.generator import Generator
from gateway.sessions.request import GenerationRequest, StopOptions
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from gateway.text import encoding
from outrider.errors import InvalidRequest, OutriderError
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams

log = logging.getLogger(__name__)

_QUESTIONS = (
    "Name the seven days of the week.",
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that adds two numbers.",
    "Count from one to twenty.",
)
_TOKENS = 40  # of an answer, at most
_SECONDS = 60.0  # for all answers; with a slower target the draft is not tested
_MIN_CHANCES = 16  # tokens for which a drafter proposed in time, for a judgement
_MAX_REPEATS = 4  # of the questions, while a drafter with a model has fewer chances because it is busy
# A drafter that predicts a smaller fraction of the tokens has an accept length near 1. Fitting ones predict half.
_MIN_FRACTION = 0.1

_CAUSES = {
    "STANDALONE": "a vocabulary whose ids mean something else, a base model with an instruction-tuned target, "
    "another language",
    "EAGLE": "a head of another model or version, a wrong --speculative-token-map, an `fc` layer read without its bias",
    "EAGLE3": "a head of another model or version, other layers than those whose states it was trained on "
    "(eagle_aux_hidden_state_layer_ids), a `d2t` that holds ids where offsets belong",
    "DFLASH": "a drafter of another model or version, other layers than those whose states it was trained on "
    "(target_layer_ids), another mask token (mask_token_id)",
    "NEXTN": "states before a norm where they belong behind it (--speculative-mtp-feature, "
    "--speculative-mtp-own-state), layers of another checkpoint",
}


@dataclass(frozen=True)
class Finding:
    """The result of one drafter. chances: tokens for which it proposed in time; accepted: those that it predicted."""

    drafter: str
    chances: int
    accepted: int

    @property
    def judged(self) -> bool:
        """True if the drafter has a model and had enough chances."""
        return self.drafter in _CAUSES and self.chances >= _MIN_CHANCES

    @property
    def broken(self) -> bool:
        """True if the drafter does not seem to fit the target."""
        return self.judged and self.accepted < _MIN_FRACTION * self.chances

    def __str__(self) -> str:
        if not self.chances:
            return f"{self.drafter} never proposed in time"
        share = f"{self.accepted / self.chances:.0%}"
        return f"{self.drafter} predicted {self.accepted} of the {self.chances} tokens that it had time for ({share})"


@dataclass
class Answers:
    """What became of the draft tokens in all answers: steps, tokens, and draft tokens that were verified, accepted."""

    steps: int = 0
    tokens: int = 0
    verified: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        length = f"accept length {self.tokens / max(1, self.steps):.2f}"
        if not self.verified:
            return f"the target verified no draft tokens, which came late or do not pay here at present ({length})"
        return f"the target accepted {self.accepted} of {self.verified} draft tokens in {self.steps} steps ({length})"

    def add(self, session: Session) -> None:
        """Count one answer."""
        self.steps += len(session.stats.steps)
        self.tokens += session.new_tokens
        self.verified += session.stats.verified
        self.accepted += session.stats.accepted


async def self_test(generator: Generator, draft: DraftLink) -> list[Finding]:
    """Wait for a draft, test it once, and log the findings. Returns them; none for a draft without a model."""
    await _up(draft)
    if draft.info is None or not set(draft.info.drafters) & _CAUSES.keys():
        return []
    try:
        async with asyncio.timeout(_SECONDS):
            findings, answers = await _test(generator, draft)
    except TimeoutError:
        log.info("the draft at %s was not tested: no answers in %.0f s", draft.address, _SECONDS)
        return []
    except OutriderError as error:
        log.info("the draft at %s was not tested: %s", draft.address, error.message)
        return []
    _log(draft, findings, answers)
    return findings


async def _test(generator: Generator, draft: DraftLink) -> tuple[list[Finding], Answers]:
    """Generate answers until each drafter with a model had enough chances."""
    before, answers = _counts(draft), Answers()
    findings: list[Finding] = []
    for _ in range(_MAX_REPEATS):
        await _answer(generator, draft, answers)
        findings = [
            Finding(name, *(now - then for now, then in zip(counts, before.get(name, (0, 0)), strict=True)))
            for name, counts in _counts(draft).items()
        ]
        if all(finding.judged for finding in findings if finding.drafter in _CAUSES):
            break
    return findings, answers


def _counts(draft: DraftLink) -> dict[str, tuple[int, int]]:
    """Chances and accepted tokens of each drafter, from the draft's last report."""
    report = draft.load.report
    return {d.name: (d.chances, d.accepted) for d in report.drafters} if report is not None else {}


def _log(draft: DraftLink, findings: Sequence[Finding], answers: Answers) -> None:
    log.info("self-test of the draft at %s: %s; %s",
             draft.address, ", ".join(map(str, findings)) or "no proposal", answers)  # fmt: skip
    for finding in findings:
        if finding.broken:
            log.warning(
                "the draft at %s does not seem to fit the target: %s. Texts are correct, but not faster. "
                "Likely causes: %s",
                draft.address, finding, _CAUSES[finding.drafter],
            )  # fmt: skip


async def _answer(generator: Generator, draft: DraftLink, answers: Answers) -> None:
    """Generate the answers to all questions together, and count them."""
    table, salt = generator.orchestrator.sessions, secrets.token_hex(8)
    sessions: list[Session] = []
    try:
        for question in _QUESTIONS:
            prompt = await _prompt(generator, question)
            max_tokens = min(_TOKENS, generator.max_session_tokens - len(prompt))
            if max_tokens > 0:
                sampling = SamplingParams(temperature=0.0)
                request = GenerationRequest(
                    prompt, sampling, StopOptions(max_tokens), cache_salt=salt, counted=False
                )  # fmt: skip
                sessions.append(table.open(request, draft))
        await asyncio.gather(*map(_finished, sessions))
    finally:
        for session in sessions:
            table.close(session)
    for session in sessions:
        answers.add(session)


async def _prompt(generator: Generator, question: str) -> list[int]:
    try:
        return await encoding.encode_chat(generator.tokenizer, [{"role": "user", "content": question}])
    except InvalidRequest:  # a model without a chat template, or whose template needs more variables
        return await encoding.encode(generator.tokenizer, question)


async def _finished(session: Session) -> None:
    while (await session.inbox.next()).finish is FinishReason.RUNNING:
        pass


class Tester:
    """Tests each kind of draft once, however many replicas of it come."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._tested: set[tuple[str, ...]] = set()

    async def test(self, draft: DraftLink) -> list[Finding]:
        """Test a draft as soon as it is up, unless one of its kind was tested. Returns the findings."""
        await _up(draft)
        if draft.draining or draft.kind in self._tested:
            return []
        self._tested.add(draft.kind)
        return await self_test(self._generator, draft)


async def _up(draft: DraftLink) -> None:
    """Wait until a draft is up, or has left its pool."""
    while not (draft.up or draft.draining):  # noqa: ASYNC110 - the link may connect and fail several times before it stays up
        await asyncio.sleep(0.2)
