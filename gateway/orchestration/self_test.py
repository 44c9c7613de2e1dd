"""The self-test of a draft: a few short answers show whether it knows the target that it drafts for.

A draft of another model, or one that is read wrongly, is no error anywhere: the text is the target's all the same, and
only comes no faster. So once a draft with a model has come up, the gateway asks a few questions at temperature 0, as a
client would, and looks at how many tokens of the answers each drafter had foretold. Its sessions count in no metric of
requests or tokens, and share no cached prefix and no n-grams with those of clients.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.orchestration.generator import Generator
from gateway.orchestration.orchestrator import Orchestrator
from gateway.sessions.session import Session
from gateway.streams.draft import DraftLink
from outrider.errors import InvalidRequest, OutriderError
from outrider.speculation.proposal import FinishReason
from outrider.speculation.sampling import SamplingParams, StopConditions

log = logging.getLogger(__name__)

_QUESTIONS = (
    "Name the seven days of the week.",
    "What is the capital of France? Answer in one sentence.",
    "Write a Python function that adds two numbers.",
    "Count from one to twenty.",
)
_TOKENS = 40  # of an answer, at most
_SECONDS = 60.0  # for all answers; a target that is slower than that is not tested
_LEAST_CHANCES = 16  # tokens that a drafter must have had a say in
_ROUNDS = 4  # of the questions, as long as a drafter with a model was heard less often; a busy one comes late
# A drafter that foretells a smaller part of the tokens has an accept length near 1. Those that fit foretell half.
_LEAST_PART = 0.1

_CAUSES = {
    "STANDALONE": "a vocabulary whose ids mean something else, a base model beside an instructed one, another language",
    "EAGLE": "a head of another model or version, a wrong --speculative-token-map, an `fc` layer read without its bias",
    "EAGLE3": "a head of another model or version, other layers than those whose states it was trained on "
    "(eagle_aux_hidden_state_layer_ids), a `d2t` that holds ids where offsets belong",
    "NEXTN": "states before a norm where they belong behind it (--speculative-mtp-feature, "
    "--speculative-mtp-own-state), layers of another checkpoint",
}


@dataclass(frozen=True)
class Finding:
    """Of one drafter: tokens that it had a say in, and those of them that it had foretold."""

    drafter: str
    chances: int
    accepted: int

    @property
    def judged(self) -> bool:
        """True if it has a model, and was heard often enough."""
        return self.drafter in _CAUSES and self.chances >= _LEAST_CHANCES

    @property
    def broken(self) -> bool:
        """True if it does not look as if it knew the target."""
        return self.judged and self.accepted < _LEAST_PART * self.chances

    def __str__(self) -> str:
        if not self.chances:
            return f"{self.drafter} was never in time"
        return f"{self.drafter} foretold {self.accepted} of {self.chances} tokens ({self.accepted / self.chances:.0%})"


async def self_test(generator: Generator, draft: DraftLink) -> list[Finding]:
    """Wait for a draft, test it once, and say what was found. Returns it; nothing for a draft without a model."""
    while not draft.up:  # noqa: ASYNC110 - its link may come and go before it is up for good
        await asyncio.sleep(0.2)
    if draft.info is None or not set(draft.info.drafters) & _CAUSES.keys():
        return []
    try:
        async with asyncio.timeout(_SECONDS):
            findings, accept_length = await _ask(generator, draft)
    except TimeoutError:
        log.info("the draft at %s was not tested: no answers in %.0f s", draft.address, _SECONDS)
        return []
    except OutriderError as error:
        log.info("the draft at %s was not tested: %s", draft.address, error.message)
        return []
    _say(draft, findings, accept_length)
    return findings


async def _ask(generator: Generator, draft: DraftLink) -> tuple[list[Finding], float]:
    """Ask until each drafter with a model was heard often enough, or rounds are over. Returns the accept length too."""
    before, steps, tokens = _told(draft), 0, 0
    findings: list[Finding] = []
    for _ in range(_ROUNDS):
        more = await _answer(generator, draft)
        steps, tokens = steps + more[0], tokens + more[1]
        findings = [
            Finding(name, *(now - then for now, then in zip(told, before.get(name, (0, 0)), strict=True)))
            for name, told in _told(draft).items()
        ]
        if all(finding.judged for finding in findings if finding.drafter in _CAUSES):
            break
    return findings, tokens / max(1, steps)


def _told(draft: DraftLink) -> dict[str, tuple[int, int]]:
    """Chances and accepted tokens of each drafter, as far as they are known."""
    return {d.name: (d.chances, d.accepted) for d in draft.load.drafters} if draft.load is not None else {}


def _say(draft: DraftLink, findings: Sequence[Finding], accept_length: float) -> None:
    log.info("self-test of the draft at %s: %s; accept length %.2f",
             draft.address, ", ".join(map(str, findings)) or "it said nothing", accept_length)  # fmt: skip
    for finding in findings:
        if finding.broken:
            log.warning(
                "the draft at %s and the target look as if they did not belong together: %s. Texts are right, and come "
                "no faster for it. Likely causes: %s",
                draft.address, finding, _CAUSES[finding.drafter],
            )  # fmt: skip


async def _answer(generator: Generator, draft: DraftLink) -> tuple[int, int]:
    """Let all questions be answered together. Returns steps and tokens, over all of them."""
    orchestrator, salt = generator.orchestrator, secrets.token_hex(8)
    sessions: list[Session] = []
    try:
        for question in _QUESTIONS:
            prompt = await _prompt(generator, question)
            stop = StopConditions(min(_TOKENS, generator.max_session_tokens - len(prompt)))
            if stop.max_tokens > 0:
                sampling = SamplingParams(temperature=0.0)
                sessions.append(orchestrator.open(prompt, sampling, stop, draft=draft, cache_salt=salt, counted=False))
        await asyncio.gather(*map(_finished, sessions))
    finally:
        for session in sessions:
            orchestrator.close(session)
    return sum(s.steps for s in sessions), sum(s.new_tokens for s in sessions)


async def _prompt(generator: Generator, question: str) -> list[int]:
    try:
        return await generator.encode_chat([{"role": "user", "content": question}])
    except InvalidRequest:  # a model without a template, or with one that wants more
        return await generator.encode(question)


async def _finished(session: Session) -> None:
    while (await session.next()).finish is FinishReason.RUNNING:
        pass


def start(generator: Generator, orchestrator: Orchestrator) -> list[asyncio.Task[list[Finding]]]:
    """Test every draft once, as soon as it is up."""
    return [asyncio.create_task(self_test(generator, draft), name="self-test") for draft in orchestrator.drafts]
