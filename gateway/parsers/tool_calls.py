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
PYTHON_TAG = "<|python_tag|>"
HERMES_MARKERS = ("<tool_call>", "</tool_call>")
DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip


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
        """Continue the present object. Returns the text behind it, if it ended or failed."""
        read = self.object.push(text)
        self.raw += text[:read]
        return text[read:]

    def emit(self, delta: Delta) -> None:
        """Add the new parts of the present call to delta, once its name is known."""
        arguments = self.object.take()
        if self.object.name is None or self.object.failed:
            return
        if not self.named:
            self.named = True
            self.index += 1
            delta.calls.append(CallPart(self.index, self.object.name, arguments))
        elif arguments:
            delta.calls.append(CallPart(self.index, None, arguments))


class HermesParser(CallParser):
    """The format of Hermes and Qwen."""

    def __init__(self) -> None:
        self._objects = _CallObjects()
        self._inside = False
        self._held = ""
        self._space = ""  # held back, because space before a call or behind the last one is not content
        self._behind = False  # nothing but space came since the last call

    def push(self, text: str) -> Delta:
        """As in CallParser."""
        delta = Delta()
        self._held += text
        more = True
        while more and self._held:
            more = self._read_call(delta) if self._inside else self._read_content(delta)
        return delta

    def finish(self) -> Delta:
        """As in CallParser. An incomplete call of which no part was returned is content."""
        unparsed = self._inside and not self._objects.named
        raw = HERMES_MARKERS[0] + self._objects.raw if unparsed else ""
        space = "" if self._behind and not raw and not self._held else self._space
        rest = "" if self._inside and not unparsed else space + raw + self._held
        self._held = self._space = ""
        return Delta(rest)

    def _read_content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, HERMES_MARKERS[:1])
        text = self._space + before
        kept = text.rstrip()
        delta.content += kept
        self._behind = self._behind and not kept
        self._space = text[len(kept) :]
        if mark is not None:
            self._space = ""
            self._inside = True
            self._objects.begin()
        return mark is not None

    def _read_call(self, delta: Delta) -> bool:
        objects = self._objects
        if not (objects.object.done or objects.object.failed):
            self._held = objects.read(self._held)
            objects.emit(delta)
            if not (objects.object.done or objects.object.failed):
                return False
        # A complete call may lack its end marker, and another call begin.
        before, mark, self._held = cut_at(self._held, HERMES_MARKERS if objects.object.done else HERMES_MARKERS[1:])
        if objects.object.failed and not objects.named:
            objects.raw += before
        if mark is None:
            return False
        again = mark == HERMES_MARKERS[0]
        if not objects.named:
            delta.content += HERMES_MARKERS[0] + objects.raw + ("" if again else HERMES_MARKERS[1])
        self._behind = objects.named
        self._inside = again
        if again:
            objects.begin()
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
        rest = (self._objects.raw if unparsed else "") + self._held
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
        if unknown or made.failed or (made.done and made.name is None):
            self._is_content = self._names is not None
            self._held = objects.raw + self._held if self._is_content else ""
            return self._is_content
        objects.emit(delta)
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
            self._held, self._between = text, False
            self._objects.begin()
            return True
        if not text or (self._names is not None and PYTHON_TAG.startswith(text)):
            return False
        self._is_content = self._names is not None
        self._held = self._held if self._is_content else ""
        return self._is_content


class DeepSeekParser(CallParser):
    """The format of DeepSeek."""

    def __init__(self) -> None:
        self._reading = self._content
        self._held = ""
        self._head = ""
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
        return Delta(held if self._reading == self._content else "")

    def _content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, DEEPSEEK_MARKERS[:2])
        delta.content += before
        if mark is not None:
            self._reading = self._name if mark == DEEPSEEK_MARKERS[1] else self._gap
        return mark is not None

    def _gap(self, delta: Delta) -> bool:
        """Text between two calls is dropped."""
        del delta
        _, mark, self._held = cut_at(self._held, DEEPSEEK_MARKERS[1:2])
        if mark is not None:
            self._reading, self._head = self._name, ""
        return mark is not None

    def _name(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, DEEPSEEK_MARKERS[2:3])
        self._head += before
        if mark is None:
            return False
        if self._head.strip() == "function":
            self._reading, self._head = self._line, ""
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
        self._reading, self._value = self._fence, JsonValue()

    def _fence(self, delta: Delta) -> bool:
        """Text before the arguments, such as a code fence."""
        del delta
        begin = self._held.find("{")
        self._held = self._held[begin:] if begin >= 0 else ""
        if begin >= 0:
            self._reading = self._arguments
        return begin >= 0

    def _arguments(self, delta: Delta) -> bool:
        count = 0
        while count < len(self._held) and not self._value.done:
            self._value.take(self._held[count])
            count += 1
        delta.calls.append(CallPart(self._index, None, self._held[:count]))
        self._held = self._held[count:]
        if self._value.done:
            self._reading = self._gap
        return self._value.done


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
