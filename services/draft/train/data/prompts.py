"""What the target is asked: conversations out of files, and ones that it begins itself; and in which order.

A file has a JSON object a line, each with one of

    prompt      what a user says                        turns      what a user says, one after another
    text        a text that goes on, without template   messages   a conversation, which ends with the user

Where the target begins, each conversation has an opening in turn: the user's first words, which say what kind of task
it is; the target goes on from there, unless the opening quotes it (passages.py). Without openings a small model writes
much of the same.

A job is one conversation at one temperature. Jobs come in passes over all conversations; every pass shuffles them anew,
and gives each another temperature. A greedy answer is the same every time, so nobody is asked for one twice.
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

_KINDS = ("prompt", "text", "turns", "messages")
_OPENINGS = Path(__file__).parent / "openings.txt"
_SOME = 1000  # conversations that the target begins in a pass, if it begins all of them


@dataclass(frozen=True)
class Conversation:
    """What is asked. name: of this conversation among all, hexadecimal.

    text:     goes on without a template
    opening:  what the user's turn begins with, if the target writes the rest of it
    messages: what was said before `turns`, as (role, content)
    turns:    what the user says, with an answer after each; empty if the target begins itself
    """

    name: str
    text: str = ""
    opening: str = ""
    messages: tuple[tuple[str, str], ...] = ()
    turns: tuple[str, ...] = ()

    @property
    def chat(self) -> bool:
        """True if it is rendered by the model's chat template."""
        return not self.text

    @property
    def free(self) -> bool:
        """True if the target writes the user's turn, too."""
        return not self.text and not self.turns


@dataclass(frozen=True)
class Job:
    """A conversation that is to be written. key: unique; seed: of its noise."""

    key: int
    conversation: Conversation
    temperature: float
    seed: int


def read_conversations(files: Sequence[str], limit: int | None = None) -> list[Conversation]:
    """The conversations of files, each once. limit: of each file. Raises ConfigError naming file and line."""
    found: dict[str, Conversation] = {}
    for name in files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"--data {name}: there is no such file")
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
    """A user's first words, a line each, in which \\n stands for a line's end. file: None for those that come along.

    Raises ConfigError if there is no such file, or nothing in it.
    """
    path = Path(file).expanduser() if file else _OPENINGS
    if not path.is_file():
        raise ConfigError(f"--free-openings {file}: there is no such file")
    openings = [line.replace("\\n", "\n") for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not openings:
        raise ConfigError(f"--free-openings {file} has no line; leave it out for those that come along")
    return openings


def _conversation(line: bytes, where: str) -> Conversation:
    try:
        content = json.loads(line.decode("utf-8-sig"))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: no UTF-8; write the file in that encoding") from None
    except UnicodeEncodeError:  # which no tokenizer takes
        raise ConfigError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff) is no character") from None
    except ValueError as error:
        raise ConfigError(f"{where}: no valid JSON: {error}") from None
    kinds = [kind for kind in _KINDS if isinstance(content, dict) and kind in content]
    if len(kinds) != 1:
        raise ConfigError(f"{where}: expected an object with one of {', '.join(_KINDS)}")
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


def _with_messages(name: str, messages: list[Any], where: str) -> Conversation:
    pairs: list[tuple[str, str]] = []
    for message in messages:
        fits = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fits:
            raise ConfigError(f"{where}: a message has a role and a content, both texts")
        pairs.append((message["role"], message["content"]))
    while pairs and pairs[-1][0] == "assistant":  # the target answers by itself
        pairs.pop()
    if not pairs or pairs[-1][0] != "user":
        raise ConfigError(f"{where}: messages must have one of the user that an answer can follow")
    return Conversation(name, messages=tuple(pairs[:-1]), turns=(pairs[-1][1],))


def jobs(
    conversations: Sequence[Conversation],
    free: int | None,
    temperatures: Sequence[float],
    seed: int,
    openings: Sequence[str] = ("",),
) -> Iterator[Job]:
    """Jobs without end, unless all are greedy. free: conversations a pass that the target begins; None for all.

    openings: what these begin with, in turn
    """
    begun = (_SOME if not conversations else 0) if free is None else free
    for number in range(10**9):
        # Those that the target begins are new in every pass.
        own = [_begun(number, i, openings) for i in range(begun)]
        todo = [*enumerate(conversations), *enumerate(own, start=len(conversations))]
        random.Random(_number("order", seed, number)).shuffle(todo)
        asked = 0
        for place, conversation in todo:
            temperature = temperatures[(place + number) % len(temperatures)]
            again = number >= len(temperatures) and not conversation.free
            if temperature == 0 and (again or (number and len(set(temperatures)) == 1 and not conversation.free)):
                continue
            asked += 1
            own_seed = _number("seed", seed, number, conversation.name)
            yield Job(_number("job", own_seed, temperature), conversation, temperature, own_seed)
        if not asked:
            return


def _begun(number: int, i: int, openings: Sequence[str]) -> Conversation:
    """The i-th conversation of a pass that the target begins."""
    opening = openings[i % len(openings)]
    return Conversation(_hash("free", number, i, *([opening] if opening else [])), opening=opening)


def is_held_out(name: str, part: float) -> bool:
    """Whether a conversation is kept for the evaluation, whatever else there is."""
    return _number("held out", name) < part * 2**63


def _hash(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _number(*facts: Any) -> int:
    """63 bits."""
    return int(_hash(*facts), 16) >> 1
