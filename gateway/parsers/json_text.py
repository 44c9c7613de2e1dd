"""JSON that comes in pieces: where a value ends, and what a call's object says so far."""

from __future__ import annotations

import json
from enum import Enum, auto

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one value."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._begun = self._string = self._escaped = False

    def take(self, character: str) -> bool:
        """True if the next character belongs to the value; one that does not may still end it."""
        if self._string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._string = False
                self.done = self._depth == 0
            return True
        if not self._begun and character in _SPACE:
            return False
        if self._begun and not self._depth and character in _SPACE + ",]}":
            self.done = True  # a number or a word
            return False
        self._begun = True
        if character == '"':
            self._string = True
        elif character in "[{":
            self._depth += 1
        elif character in "]}":
            self._depth -= 1
            self.done = self._depth <= 0
        return True


class _At(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()


class CallObject:
    """`{"name": ..., "arguments": {...}}`, in any order, `parameters` for the latter. Fails on what is none."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._at = _At.OBJECT
        self._value = JsonValue()
        self._raw: list[str] = []  # characters of the key or value that is read
        self._key = ""
        self._fresh: list[str] = []  # parts of the arguments that nobody has taken
        self._has_arguments = False

    def push(self, text: str) -> int:
        """Read on. Returns how many characters were read, which is all unless the object ends or fails."""
        for place, character in enumerate(text):
            if self.done or self.failed:
                return place
            self._read(character)
        return len(text)

    def take(self) -> str:
        """Arguments that have become known, once the name is."""
        if self.name is None:
            return ""
        if self.done and not self._has_arguments:
            self._tell("{}")
        new = "".join(self._fresh)
        self._fresh.clear()
        return new

    def _tell(self, arguments: str) -> None:
        self._has_arguments = self._has_arguments or bool(arguments)
        self._fresh.append(arguments)

    def _read(self, character: str) -> None:
        match self._at:
            case _At.OBJECT:
                if character == "{":
                    self._expect(_At.KEY)
                elif character not in _SPACE:
                    self.failed = True
            case _At.KEY:
                self._read_key(character)
            case _At.COLON:
                if character == ":":
                    self._expect(_At.VALUE)
                elif character not in _SPACE:
                    self.failed = True
            case _At.VALUE:
                self._read_value(character)

    def _expect(self, at: _At) -> None:
        self._at, self._value, self._raw = at, JsonValue(), []

    def _read_key(self, character: str) -> None:
        if not self._raw and character in _SPACE + ",":
            return
        if not self._raw and character == "}":
            self.done = True
            return
        self._value.take(character)
        self._raw.append(character)
        if self._raw[0] != '"':
            self.failed = True
        elif self._value.done:
            self._key = str(self._loaded())
            self._expect(_At.COLON)

    def _read_value(self, character: str) -> None:
        if self._value.take(character):
            self._raw.append(character)
            # An object is told as it comes; whatever else stands there, once it is complete.
            if self._key in _ARGUMENTS and self._raw[0] == "{":
                self._tell(character)
        if not self._value.done:
            return
        if self._key == "name":
            self.name = name if isinstance(name := self._loaded(), str) else None
            self.failed |= self.name is None
        elif self._key in _ARGUMENTS and not self._has_arguments:
            value = self._loaded()
            self._tell(value if isinstance(value, str) else "".join(self._raw))
        ended_by_it = character == "}" and self._raw[-1:] != ["}"]
        self._expect(_At.KEY)
        self.done = self.done or ended_by_it

    def _loaded(self) -> object:
        try:
            return json.loads("".join(self._raw))
        except ValueError:
            self.failed = True
            return None
