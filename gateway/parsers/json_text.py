"""Incremental JSON: the end of a value, and the name and arguments of a tool call's object."""

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
        """True if the next character belongs to the value; a character behind it ends a number or word."""
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


class _State(Enum):
    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()


class CallObject:
    """`{"name": ..., "arguments": {...}}`, in any order, or `parameters` for the latter. Fails on other text."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = self.failed = False
        self._state = _State.OBJECT
        self._value = JsonValue()
        self._raw: list[str] = []  # characters of the present key or value
        self._key = ""
        self._fresh: list[str] = []  # parts of the arguments that `take` has not returned
        self._has_arguments = False

    def push(self, text: str) -> int:
        """Continue. Returns how many characters were read: all, unless the object ends or fails."""
        for index, character in enumerate(text):
            if self.done or self.failed:
                return index
            self._read(character)
        return len(text)

    def take(self) -> str:
        """New parts of the arguments, once the name is known."""
        if self.name is None:
            return ""
        if self.done and not self._has_arguments:
            self._add("{}")
        new = "".join(self._fresh)
        self._fresh.clear()
        return new

    def _add(self, arguments: str) -> None:
        self._has_arguments = self._has_arguments or bool(arguments)
        self._fresh.append(arguments)

    def _read(self, character: str) -> None:
        match self._state:
            case _State.OBJECT:
                if character == "{":
                    self._expect(_State.KEY)
                elif character not in _SPACE:
                    self.failed = True
            case _State.KEY:
                self._read_key(character)
            case _State.COLON:
                if character == ":":
                    self._expect(_State.VALUE)
                elif character not in _SPACE:
                    self.failed = True
            case _State.VALUE:
                self._read_value(character)

    def _expect(self, state: _State) -> None:
        self._state, self._value, self._raw = state, JsonValue(), []

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
            self._expect(_State.COLON)

    def _read_value(self, character: str) -> None:
        if self._value.take(character):
            self._raw.append(character)
            # An object is returned as it grows, any other value once it is complete.
            if self._key in _ARGUMENTS and self._raw[0] == "{":
                self._add(character)
        if not self._value.done:
            return
        if self._key == "name":
            self.name = name if isinstance(name := self._loaded(), str) else None
            self.failed |= self.name is None
        elif self._key in _ARGUMENTS and not self._has_arguments:
            value = self._loaded()
            # Some models write null, or an empty text, for a function without arguments.
            given = value if isinstance(value, str) else "" if value is None else "".join(self._raw)
            self._add(given if given.strip() else "{}")
        ended = character == "}" and self._raw[-1:] != ["}"]
        self._expect(_State.KEY)
        self.done = self.done or ended

    def _loaded(self) -> object:
        try:
            return json.loads("".join(self._raw))
        except ValueError:
            self.failed = True
            return None
