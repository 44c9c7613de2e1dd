"""A target and a draft whose answers can be computed by hand, and their tokenizer.

The next token is the last one plus a stride, modulo the vocabulary: 1 for greedy sessions, else 1 + seed % 3. Ids
follow the order of the byte alphabet, so that after "A" comes "BCDEF...". The draft proposes two tokens that are right
and one that is wrong.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.errors import InvalidRequest, Overloaded, Unavailable
from outrider.serving.loop import Engine
from outrider.serving.messages import EngineLoad, OpenSession, SessionFailure, StepOutput
from outrider.speculation.draft_source import SourceKind
from outrider.speculation.proposal import UNLIMITED_DRAFT, Commit, FinishReason, Logprobs, Proposal
from outrider.speculation.tree import ROOT, SpeculationTree

VOCAB = 300
CONTEXT = 400
EOS = 1
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|user|>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REFUSED = VOCAB - 1  # the target refuses a prompt that ends with this token
BUSY = VOCAB - 2  # the target has no room for a prompt that ends with this token


def tokenizer() -> Tokenizer:
    """Byte-level: 4 special tokens, 256 bytes in the order of their characters, 40 pairs of small letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters if a != b][: VOCAB - len(SPECIAL) - len(alphabet)]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet, *(a + b for a, b in pairs)])}
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    assert made.get_vocab_size() == VOCAB
    return made


def tokenizer_files(template: str | None = TEMPLATE) -> dict[str, bytes]:
    """The tokenizer files of a target."""
    settings = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1], "chat_template": template}
    settings["model_max_length"] = int(1e30)  # as transformers writes it for no limit
    return {
        "tokenizer.json": tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps({k: v for k, v in settings.items() if v is not None}).encode(),
    }


def stride(request: OpenSession) -> int:
    return 1 if request.sampling.greedy else 1 + request.sampling.seed % 3


def expected(prompt: Sequence[int], count: int, step: int = 1) -> list[int]:
    """The first `count` tokens of the answer to a prompt, without a stop token."""
    return [(prompt[-1] + step * (i + 1)) % VOCAB for i in range(count)]


def common(request: OpenSession, other: OpenSession) -> int:
    """Tokens of a prompt that an earlier one of the same salt has cached; never all of them."""
    if request.cache_salt != other.cache_salt:
        return 0
    length = min(request.prompt_length - 1, other.prompt_length)
    differ = np.flatnonzero(request.tokens[:length] != other.tokens[:length])
    return int(differ[0]) if len(differ) else length


def logprobs_of(tokens: Sequence[int], start: int, stop: int, top: int) -> Logprobs:
    """Log-probability -t / 4 for the token at position t; the likeliest are itself and the next ids, 1 less each."""
    values = -np.arange(start, stop, dtype=np.float32) / 4
    ranks = np.arange(top)
    best = (np.array(tokens[start:stop], np.uint32)[:, None] + ranks.astype(np.uint32)) % VOCAB
    return Logprobs(start, values, best, (values[:, None] - ranks).astype(np.float32))


class _Sequence:
    def __init__(self, request: OpenSession) -> None:
        self.request = request
        self.tree = SpeculationTree(request.tokens)
        self.tokens: list[int] = request.tokens.tolist()
        self.stride = stride(request)
        self.cached = 0

    def next(self) -> int:
        """The next token."""
        stop = self.request.stop
        token = (self.tokens[-1] + self.stride) % VOCAB
        early = len(self.tokens) - self.request.prompt_length < stop.min_tokens
        return (token + 1) % VOCAB if early and token in stop.stop_ids((EOS,)) else token

    def append(self, token: int) -> FinishReason:
        self.tokens.append(token)
        stop = self.request.stop
        if token in stop.stop_ids((EOS,)):
            return FinishReason.STOP
        new = len(self.tokens) - self.request.prompt_length
        return FinishReason.LENGTH if new >= stop.max_tokens else FinishReason.RUNNING


class FakeEngine(Engine):
    """Open sessions, for a test to inspect; `delay` is the duration of a step, in seconds.

    drafting_paused: in its load and its commits
    held: it takes no steps
    """

    drafting_paused = held = False

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.sessions: dict[int, _Sequence] = {}
        self.opened = 0
        self.seen: list[OpenSession] = []

    def open(self, request: OpenSession) -> None:
        self.sessions[request.session_id] = _Sequence(request)
        self.opened += 1
        self.seen.append(request)

    def close(self, session_id: int) -> None:
        self.sessions.pop(session_id, None)

    def load(self) -> EngineLoad:
        return EngineLoad(
            running_sessions=len(self.sessions), free_pages=7, total_pages=9, drafting_paused=self.drafting_paused,
            paused=self.held,
        )  # fmt: skip

    def check(self) -> None:
        pass


class FakeTarget(FakeEngine):
    """Verifies proposals as the real target does, with a model that counts. full: it refuses new sessions."""

    full = False

    def open(self, request: OpenSession) -> None:
        request.validate(VOCAB, CONTEXT)
        if request.grammar is not None and request.grammar.text == "wrong":
            raise InvalidRequest("the grammar cannot be compiled", param=request.grammar.kind.param)
        if int(request.tokens[-1]) == REFUSED:
            raise InvalidRequest("the target does not like this prompt", param="prompt")
        if self.full or int(request.tokens[-1]) == BUSY:
            raise Overloaded("3 requests wait already; retry later")
        cached = max((common(request, other) for other in self.seen), default=0)
        super().open(request)
        self.sessions[request.session_id].cached = cached

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        for proposal in proposals:
            if (sequence := self.sessions.get(proposal.session_id)) is not None:
                sequence.tree.merge(proposal)

    @property
    def idle(self) -> bool:
        return self.held or not self.sessions

    def step(self) -> StepOutput:
        time.sleep(self.delay)
        output = StepOutput(load=self.load())
        for session_id, sequence in list(self.sessions.items()):
            commit = self._verify(session_id, sequence)
            output.commits.append(commit)
            if commit.finish_reason != FinishReason.RUNNING:
                del self.sessions[session_id]
        return output

    def _verify(self, session_id: int, sequence: _Sequence) -> Commit:
        base, tree, node, reason = len(sequence.tokens), sequence.tree, ROOT, FinishReason.RUNNING
        verified = len(tree)
        accepted = 0
        while reason == FinishReason.RUNNING:
            token = sequence.next()
            children = {tree.token[child]: child for child in tree.children_of(node)}
            reason = sequence.append(token)
            if token not in children or reason == FinishReason.LENGTH:  # the last token that fits is the bonus token
                break
            node = children[token]
            accepted += 1
        new = np.array(sequence.tokens[base:], np.uint32)
        tree.commit(new)
        cached, sequence.cached = sequence.cached, 0
        budget = 0 if self.drafting_paused else UNLIMITED_DRAFT
        commit = Commit(
            session_id, base, new, tree.root_hash, verified, accepted, reason, cached, draft_budget=budget,
            source=SourceKind.DRAFT if verified else 0,
        )  # fmt: skip
        request = sequence.request
        if request.logprobs is not None:
            commit = replace(
                commit, logprobs=logprobs_of(sequence.tokens, base, len(sequence.tokens), request.logprobs)
            )
        if request.prompt_logprobs is not None and base == request.prompt_length > 1:
            prompt_logprobs = logprobs_of(sequence.tokens, 1, base, request.prompt_logprobs)
            commit = replace(commit, prompt_logprobs=prompt_logprobs)
        return commit


class FakeDraft(FakeEngine):
    """Proposes two right tokens and a wrong one after every commit."""

    def __init__(self, delay: float = 0.0) -> None:
        super().__init__(delay)
        self.frames = 0  # with commits
        self._fresh: set[int] = set()
        self._failures: list[SessionFailure] = []

    def open(self, request: OpenSession) -> None:
        super().open(request)
        self._fresh.add(request.session_id)

    def close(self, session_id: int) -> None:
        super().close(session_id)
        self._fresh.discard(session_id)

    def lose(self, session_id: int) -> None:
        """End a session with an error, as if it had missed a commit."""
        self.close(session_id)
        self._failures.append(SessionFailure(session_id, Unavailable("lost track; open it again")))

    def receive(self, proposals: Sequence[Proposal], commits: Sequence[Commit]) -> None:
        self.frames += bool(commits)
        for commit in commits:
            sequence = self.sessions.get(commit.session_id)
            if sequence is None:
                continue
            known = len(sequence.tokens) - commit.base_length
            if commit.finish_reason != FinishReason.RUNNING:
                self.close(commit.session_id)
            elif known < 0:
                self.lose(commit.session_id)
            elif known < len(commit.tokens):
                sequence.tokens += commit.tokens.tolist()[known:]
                sequence.tree.commit(commit.tokens[known:])
                assert sequence.tree.root_hash == commit.root_hash
                self._fresh.add(commit.session_id)

    @property
    def idle(self) -> bool:
        return not self._fresh and not self._failures

    def step(self) -> StepOutput:
        time.sleep(self.delay)
        failures, self._failures = self._failures, []
        output = StepOutput(failures=failures, load=self.load())
        for session_id in self._fresh:
            sequence = self.sessions[session_id]
            last, length = sequence.tokens[-1], len(sequence.tokens)
            chain = [(last + sequence.stride * (i + 1)) % VOCAB for i in range(3)]
            chain[2] = (chain[2] + 7) % VOCAB
            output.proposals.append(
                Proposal(
                    session_id, length, sequence.tree.root_hash, np.array(chain, np.uint32),
                    np.arange(-1, 2, dtype=np.int32), np.full(3, -0.1, np.float32), length,
                )
            )  # fmt: skip
        self._fresh.clear()
        return output
