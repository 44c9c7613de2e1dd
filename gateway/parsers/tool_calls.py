"""Parsers of the formats in which models write tool calls.

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes and Qwen
llama      {"name": ..., "parameters": {...}}, one or several separated by `;`, instead of content
deepseek   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments, fenced or not, <｜tool▁call▁end｜>
forced     an array of such objects and nothing else, enforced by a grammar
named      the arguments of one call and nothing else
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.parsers.base import CallParser, CallPart, Delta, cut_at
from gateway.parsers.json_text import CallObject, JsonValue

_SEPARATORS = " \t\r\n;,"
_DEBRIS = _SEPARATORS + "]}"  # behind an object
PYTHON_TAG = "<|python_tag|>"
HERMES_MARKERS = ("<tool_call>", "</tool_call>")
DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_CALLS, _CALL, _SEPARATOR, _CALL_END, _CALLS_END = DEEPSEEK_MARKERS


class _CallObjects:
    """Calls that are JSON objects, one after the other."""

    def __init__(self) -> None:
        self.index = -1
        self.begin()

    def begin(self) -> None:
        """Expect the next object."""
        self.object = CallObject()
        self.raw = ""
        self.named = False

    def read(self, text: str) -> str:
        """Continue the present object. Returns the text behind it, if it ended, or from where it failed."""
        read = self.object.push(text) - self.object.failed
        self.raw += text[:read]
        return text[read:]

    def emit(self, delta: Delta) -> None:
        """Add the new parts of the present call to delta, once its name is known."""
        arguments = self.object.take()
        if self.object.name is None:
            return
        if not self.named:
            self.named = True
            self.index += 1
            delta.calls.append(CallPart(self.index, self.object.name, arguments))
        elif arguments:
            delta.calls.append(CallPart(self.index, None, arguments))


class HermesParser(CallParser):
    """The format of Hermes and Qwen. A tag may hold several objects; one that holds no call is content.

    Dropped are markers of calls, space around them, and debris of JSON behind an object in its tag.
    """

    def __init__(self) -> None:
        self._objects = _CallObjects()
        self._reading = self._content
        self._held = ""
        self._space = ""  # held back, because space before a call or behind the last one is not content
        self._opening = ""  # the present object's begin marker, with the space before it
        self._behind = False  # nothing but space came since the last call
        self._unclosed = False  # the end marker of a call's tag is still to come, behind content

    def push(self, text: str) -> Delta:
        """As in CallParser."""
        delta = Delta()
        self._held += text
        while self._held and self._reading(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """As in CallParser. An incomplete call of which no part was returned is content."""
        held, self._held = self._held, ""
        if self._reading == self._content:
            return Delta("" if self._behind and not held else self._space + held)
        incomplete = self._reading == self._object and not self._objects.named
        return Delta(self._opening + self._objects.raw if incomplete else "")

    def _content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, HERMES_MARKERS if self._unclosed else HERMES_MARKERS[:1])
        text = self._space + before
        kept = text.rstrip()
        delta.content += kept
        self._behind = self._behind and not kept
        self._space = text[len(kept) :]
        if mark == HERMES_MARKERS[0]:
            self._begin(self._space + mark)
        elif mark is not None:
            self._unclosed = False
        return mark is not None

    def _begin(self, opening: str) -> None:
        """Expect an object."""
        self._opening, self._space, self._unclosed, self._reading = opening, "", False, self._object
        self._objects.begin()

    def _object(self, delta: Delta) -> bool:
        objects = self._objects
        self._held = objects.read(self._held)
        objects.emit(delta)
        if not (objects.object.done or objects.object.failed):
            return False
        if objects.named:
            self._reading = self._tail
        else:
            delta.content += self._opening
            self._reading, self._behind = self._content, False
            self._held = objects.raw + self._held  # another begin marker may be in it
        return True

    def _tail(self, delta: Delta) -> bool:
        """Behind a call in its tag: another object, the end marker, or without it the next begin marker."""
        del delta
        self._held = text = self._held.lstrip(_DEBRIS)
        begin, end = HERMES_MARKERS
        if text.startswith("{"):
            self._begin("")
        elif text.startswith(begin):
            self._held = text[len(begin) :]
            self._begin(begin)
        elif text.startswith(end):
            self._held = text[len(end) :]
            self._reading, self._behind = self._content, True
        elif begin.startswith(text) or end.startswith(text):
            return False
        else:
            self._reading, self._behind, self._unclosed = self._content, False, True
        return True


class JsonCallsParser(CallParser):
    """Bare objects: the format of Llama, or enforced by a grammar."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """names: of tools; an object that calls none of them is content. None: a grammar enforces calls."""
        self._names = names
        self._objects = _CallObjects()
        self._is_content = False
        self._between = True
        self._held = ""
        self._before = ""  # what stood before the present object, and is content with it if it is no call

    def push(self, text: str) -> Delta:
        """As in CallParser."""
        delta = Delta()
        self._held += text
        more = True
        while more and self._held:
            more = self._read(delta)
        return delta

    def finish(self) -> Delta:
        """As in CallParser."""
        unparsed = not (self._names is None or self._between or self._is_content or self._objects.named)
        rest = (self._before + self._objects.raw if unparsed else "") + self._held
        if self._between and self._objects.index >= 0 and not self._held.strip(_SEPARATORS):
            rest = ""
        self._held = ""
        return Delta(rest if self._names is not None else "")

    def _read(self, delta: Delta) -> bool:
        if self._is_content:
            delta.content += self._held
            self._held = ""
            return False
        if self._between:
            return self._seek()
        objects = self._objects
        self._held = objects.read(self._held)
        made = objects.object
        unknown = made.name is not None and self._names is not None and made.name not in self._names
        if not unknown:
            objects.emit(delta)
        if unknown or made.failed or (made.done and made.name is None):
            self._is_content = self._names is not None
            whole = "" if objects.named else self._before + objects.raw  # parts of a call were sent as such
            self._held = whole + self._held if self._is_content else ""
            return self._is_content
        self._between = made.done
        return made.done

    def _seek(self) -> bool:
        """Find the next object, or the end of the calls."""
        text = self._held.lstrip(_SEPARATORS if self._objects.index >= 0 else None)
        if self._names is None:
            text = self._held.lstrip(_SEPARATORS + "[]")
        elif text.startswith(PYTHON_TAG):
            text = text.removeprefix(PYTHON_TAG).lstrip()
        if text.startswith("{"):
            self._before = self._held[: len(self._held) - len(text)]
            self._held, self._between = text, False
            self._objects.begin()
            return True
        if not text or (self._names is not None and PYTHON_TAG.startswith(text)):
            return False
        self._is_content = self._names is not None
        self._held = self._held if self._is_content else ""
        return self._is_content


class DeepSeekParser(CallParser):
    """The format of DeepSeek. Markers without a call behind them are content."""

    def __init__(self) -> None:
        self._reading = self._content
        self._held = ""
        self._head = ""
        self._raw = ""  # markers and text that are content unless a call follows
        self._index = -1

    def push(self, text: str) -> Delta:
        """As in CallParser."""
        delta = Delta()
        self._held += text
        while self._held and self._reading(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """As in CallParser."""
        held, self._held = self._held, ""
        if self._reading in (self._fence, self._arguments, self._tail):
            return Delta()
        return Delta(self._raw + held if self._raw or self._reading == self._content else "")

    def _content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, (_CALLS, _CALL))
        delta.content += before
        return self._enter(mark, mark or "")

    def _enter(self, mark: str | None, raw: str) -> bool:
        """Continue behind a marker. raw: it, with what is content unless a call follows."""
        match mark:
            case None:
                return False
            case m if m == _CALL:
                self._reading, self._head, self._raw = self._name, "", raw
            case m if m in (_CALLS, _CALL_END):
                self._reading, self._raw = self._gap, raw
            case _:
                self._reading, self._raw = self._content, ""
        return True

    def _gap(self, delta: Delta) -> bool:
        """Before the first call, or between two: space is dropped."""
        text = self._held.lstrip()
        space = self._held[: len(self._held) - len(text)]
        for mark in (_CALL, _CALLS_END):
            if text.startswith(mark):
                self._held = text[len(mark) :]
                if mark == _CALLS_END and self._raw:
                    delta.content += self._raw + space + mark
                return self._enter(mark, self._raw and self._raw + space + mark)
            if mark.startswith(text):
                return False
        delta.content += self._raw
        self._reading, self._raw = self._content, ""
        return True

    def _name(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, (_SEPARATOR, _CALL, _CALL_END, _CALLS_END))
        self._head += before
        self._raw += before
        if mark is None:
            return False
        if mark != _SEPARATOR:  # no call
            delta.content += self._raw
            self._raw, self._reading, self._held = "", self._content, mark + self._held
            if mark != _CALL:
                delta.content, self._held = delta.content + mark, self._held[len(mark) :]
            return True
        self._raw += mark
        if self._head.strip() == "function":
            self._reading = self._line
        else:
            self._begin(self._head, delta)
        return True

    def _line(self, delta: Delta) -> bool:
        """A name that ends with its line."""
        line, end, rest = self._held.partition("\n")
        if end:
            self._held = rest
            self._begin(line, delta)
        return bool(end)

    def _begin(self, name: str, delta: Delta) -> None:
        self._index += 1
        delta.calls.append(CallPart(self._index, name.strip(), ""))
        self._reading, self._value, self._raw = self._fence, JsonValue(), ""

    def _fence(self, delta: Delta) -> bool:
        """Text before the arguments, such as a code fence. A call may have none, or null."""
        _, mark, self._held = cut_at(self._held, ("{", _CALL_END, _CALL, _CALLS_END))
        if mark == "{":
            self._held = mark + self._held
            self._reading = self._arguments
            return True
        if mark is not None:
            delta.calls.append(CallPart(self._index, None, "{}"))
        return self._enter(mark, "")

    def _arguments(self, delta: Delta) -> bool:
        count = 0
        while count < len(self._held) and not self._value.done:
            self._value.take(self._held[count])
            count += 1
        delta.calls.append(CallPart(self._index, None, self._held[:count]))
        self._held = self._held[count:]
        if self._value.done:
            self._reading = self._tail
        return self._value.done

    def _tail(self, delta: Delta) -> bool:
        """Behind the arguments: the fence's end and the end marker, either of which may be missing."""
        del delta
        self._held = text = self._held.lstrip(_DEBRIS + "`")
        for mark in (_CALL_END, _CALL, _CALLS_END):
            if text.startswith(mark):
                self._held = text[len(mark) :]
                return self._enter(mark, "")
            if mark.startswith(text):
                return False
        self._reading = self._content
        return True


class NamedCallParser(CallParser):
    """The whole text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        """As in CallParser."""
        name, self._name = self._name, None
        return Delta(calls=[CallPart(0, name, text)])

    def finish(self) -> Delta:
        """As in CallParser."""
        return Delta()
