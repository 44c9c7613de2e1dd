"""Conversations that the target answers, from files or begun by the target itself, and their order.

A file has one JSON object a line, with one of these keys:

    prompt      one user turn                           turns      several user turns
    text        a text to continue, without template    messages   a conversation that ends with a user turn

or a rollout, whose answer is there (rollouts.py). A file of answers as token ids (compact.py) holds rollouts, too.

A conversation that the target begins has an opening: the first words of the user turn, which name the kind of task. The
target writes the rest of the turn, unless the opening quotes earlier answers (passages.py). Without openings a small
model writes similar turns again and again.

A job is one conversation at one temperature. Jobs come in passes over all conversations; every pass shuffles them, and
gives each conversation another temperature. A greedy answer never changes, so it is requested once, as is a rollout.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import ConfigError
from services.draft.train.data.compact import SUFFIX, read_compact
from services.draft.train.data.rollouts import Rollout, is_rollout, read_rollout

_KINDS = ("prompt", "text", "turns", "messages")
_OPENINGS = Path(__file__).parent / "openings.txt"
_DEFAULT_FREE = 1000  # conversations a pass that the target begins, if there are no others


@dataclass(frozen=True)
class Conversation:
    """A conversation to generate answers for. name: its hash among all conversations, hexadecimal.

    text:     continued without a template
    opening:  the beginning of a user turn whose rest the target writes
    messages: earlier messages before `turns`, as (role, content)
    turns:    user turns, each followed by an answer; empty if the target begins the conversation
    rollout:  prompt and answer, in place of all others
    """

    name: str
    text: str = ""
    opening: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    turns: tuple[str, ...] = ()
    rollout: Rollout | None = None

    @property
    def chat(self) -> bool:
        """True if the conversation is rendered by the model's chat template."""
        return not self.text and self.rollout is None

    @property
    def free(self) -> bool:
        """True if the target writes the user turn."""
        return self.chat and not self.turns


@dataclass(frozen=True)
class PromptJob:
    """A conversation to generate at one temperature. key: unique; seed: of the sampling noise."""

    key: int
    conversation: Conversation
    temperature: float
    seed: int


def read_conversations(files: Sequence[str], limit: int | None = None) -> list[Conversation]:
    """The conversations of files, without duplicates. limit: per file. Raises ConfigError with file and line."""
    found: dict[str, Conversation] = {}
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"--data {name}: there is no such file")
        if path.suffix == SUFFIX:
            found |= {one.name: one for one in map(_of_rollout, read_compact(path)[:limit])}
            continue
        count = 0
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if limit is not None and count >= limit:
                    break
                if line.strip():
                    conversation = _conversation(line, f"{path}, line {number}")
                    found[conversation.name] = conversation
                    count += 1
        if not count:
            raise ConfigError(f"--data {name} has no prompts")
    return list(found.values())


def read_openings(file: str | None) -> list[str]:
    """First words of user turns, one a line; \\n in a line stands for a line break. file: None for the bundled ones.

    Raises ConfigError for a missing or empty file.
    """
    path = Path(file).expanduser() if file else _OPENINGS
    if not path.is_file():
        raise ConfigError(f"--free-openings {file}: there is no such file")
    openings = [line.replace("\\n", "\n") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not openings:
        raise ConfigError(f"--free-openings {file} has no line; leave it out to use the bundled openings")
    return openings


def _parsed(line: bytes, where: str) -> Any:
    try:
        content = json.loads(line.decode("utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8; write the file in that encoding") from None
    except UnicodeEncodeError:  # no tokenizer accepts surrogates
        raise ConfigError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is not a character") from None
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    return content


def _conversation(line: bytes, where: str) -> Conversation:
    content = _parsed(line, where)
    if is_rollout(content):
        return _of_rollout(read_rollout(content, where))
    kinds = [kind for kind in _KINDS if isinstance(content, dict) and kind in content]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: expected an object with one of {', '.join(_KINDS)}, or a rollout")
    value, kind = content[kinds[0]], kinds[0]
    name = hashlib.sha256(json.dumps([kind, value], sort_keys=True).encode()).hexdigest()[:16]
    if kind in ("prompt", "text"):
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(f"{where}: {kind} must be a text")
        return Conversation(name, text=value) if kind == "text" else Conversation(name, turns=(value,))
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: {kind} must be a list that is not empty")
    if kind == "turns":
        if not all(isinstance(turn, str) and turn.strip() for turn in value):
            raise ConfigError(f"{where}: turns must be texts")
        return Conversation(name, turns=tuple(value))
    return _with_messages(name, value, where)


def _of_rollout(rollout: Rollout) -> Conversation:
    return Conversation(hashlib.sha256(rollout.content).hexdigest()[:16], rollout=rollout)


def _with_messages(name: str, messages: list[Any], where: str) -> Conversation:
    pairs: list[tuple[str, str]] = []
    for message in messages:
        fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            raise ConfigError(f"{where}: a message has a role and a content, both texts")
        pairs.append((message["role"], message["content"]))
    while pairs and pairs[-1][0] == "assistant":  # the target writes the answer itself
        pairs.pop()
    if not pairs or pairs[-1][0] != "user":
        raise ConfigError(f"{where}: messages must have a user message to answer")
    return Conversation(name, messages=tuple(pairs[:-1]), turns=(pairs[-1][1],))


def jobs(
    conversations: Sequence[Conversation],
    free: int | None,
    temperatures: Sequence[float],
    seed: int,
    openings: Sequence[str] = ("",),
) -> Iterator[PromptJob]:
    """Jobs without end, unless all are greedy. free: conversations a pass that the target begins; None: all of them.

    openings: beginnings of user turns, used in turn
    """
    begun = (_DEFAULT_FREE if not conversations else 0) if free is None else free
    for number in range(10**9):
        # Conversations that the target begins are new in every pass.
        own = [_begun_by_target(number, i, openings) for i in range(begun)]
        todo = [*enumerate(conversations), *enumerate(own, start=len(conversations))]
        random.Random(_number("order", seed, number)).shuffle(todo)
        asked = 0
        for place, conversation in todo:
            temperature = temperatures[(place + number) % len(temperatures)]
            again = number >= len(temperatures) and not conversation.free
            if conversation.rollout is not None and number:
                continue
            if temperature == 0 and (again or (number and len(set(temperatures)) == 1 and not conversation.free)):
                continue
            asked += 1
            own_seed = _number("seed", seed, number, conversation.name)
            yield PromptJob(_number("job", own_seed, temperature), conversation, temperature, own_seed)
        if not asked:
            return


def _begun_by_target(number: int, i: int, openings: Sequence[str]) -> Conversation:
    """Conversation `i`, begun by the target, of pass `number`."""
    opening = openings[i % len(openings)]
    return Conversation(_hash("free", number, i, *([opening] if opening else [])), opening=opening)


def is_held_out(name: str, part: float) -> bool:
    """True if a conversation is kept for evaluation; depends on its name alone."""
    return _number("held out", name) < part * 2**63


def _hash(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _number(*facts: Any) -> int:
    """A 63-bit hash."""
    return int(_hash(*facts), 16) >> 1
