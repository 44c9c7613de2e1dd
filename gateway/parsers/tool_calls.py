"""How models write calls of tools.

hermes     <tool_call>{"name": ..., "arguments": {...}}</tool_call>, of Hermes and Qwen
llama      {"name": ..., "parameters": {...}}, perhaps several with `;` between them, instead of an answer
deepseek   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, then the arguments, fenced or not, <｜tool▁call▁end｜>
forced     an array of such objects, and nothing else: what a grammar made the model say
named      the arguments of one call, and nothing else
"""

from __future__ import annotations

from collections.abc import Collection

from gateway.parsers.base import CallPart, CallReader, Delta, cut_at
from gateway.parsers.json_text import CallObject, JsonValue

_SEPARATORS = " \t\r\n;,"
PYTHON_TAG = "<|python_tag|>"
HERMES_MARKS = ("<tool_call>", "</tool_call>")
DEEPSEEK_MARKS = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip


class _Objects:
    """Calls that are objects, one after the other."""

    def __init__(self) -> None:
        self.index = -1
        self.begin()

    def begin(self) -> None:
        """Expect the next."""
        self.object = CallObject()
        self.raw = ""
        self.named = False

    def read(self, text: str) -> str:
        """Read on in the present object. Returns what stands behind it, if it ended or failed there."""
        read = self.object.push(text)
        self.raw += text[:read]
        return text[read:]

    def tell(self, delta: Delta) -> None:
        """What is known of the present call, once its name is."""
        arguments = self.object.take()
        if self.object.name is None or self.object.failed:
            return
        if not self.named:
            self.named = True
            self.index += 1
            delta.calls.append(CallPart(self.index, self.object.name, arguments))
        elif arguments:
            delta.calls.append(CallPart(self.index, None, arguments))


class HermesReader(CallReader):
    """As of Hermes and Qwen."""

    def __init__(self) -> None:
        self._objects = _Objects()
        self._inside = False
        self._held = ""
        self._space = ""  # held back: before a call it is no content, nor behind the last one
        self._behind = False  # a call, with nothing else since

    def push(self, text: str) -> Delta:
        """As in CallReader."""
        delta = Delta()
        self._held += text
        going = True
        while going and self._held:
            going = self._read_call(delta) if self._inside else self._read_content(delta)
        return delta

    def finish(self) -> Delta:
        """As in CallReader. A call that was never complete, and has not been told, is content."""
        unparsed = self._inside and not self._objects.named
        raw = HERMES_MARKS[0] + self._objects.raw if unparsed else ""
        space = "" if self._behind and not raw and not self._held else self._space
        rest = "" if self._inside and not unparsed else space + raw + self._held
        self._held = self._space = ""
        return Delta(rest)

    def _read_content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, HERMES_MARKS[:1])
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
            objects.tell(delta)
            if not (objects.object.done or objects.object.failed):
                return False
        # A call that is whole may lack its last mark, and another one begin.
        before, mark, self._held = cut_at(self._held, HERMES_MARKS if objects.object.done else HERMES_MARKS[1:])
        if objects.object.failed and not objects.named:
            objects.raw += before
        if mark is None:
            return False
        again = mark == HERMES_MARKS[0]
        if not objects.named:
            delta.content += HERMES_MARKS[0] + objects.raw + ("" if again else HERMES_MARKS[1])
        self._behind = objects.named
        self._inside = again
        if again:
            objects.begin()
        return True


class ObjectsReader(CallReader):
    """Bare objects: as of Llama, or forced by a grammar."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        """names: of tools; an object that calls none of them is content. None: a grammar has seen to it."""
        self._names = names
        self._objects = _Objects()
        self._is_content = False
        self._between = True
        self._held = ""

    def push(self, text: str) -> Delta:
        """As in CallReader."""
        delta = Delta()
        self._held += text
        going = True
        while going and self._held:
            going = self._read(delta)
        return delta

    def finish(self) -> Delta:
        """As in CallReader."""
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
        objects.tell(delta)
        self._between = made.done
        return made.done

    def _seek(self) -> bool:
        """Find the next object, or that there is none."""
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


class DeepSeekReader(CallReader):
    """As of DeepSeek."""

    def __init__(self) -> None:
        self._reading = self._content
        self._held = ""
        self._head = ""
        self._index = -1

    def push(self, text: str) -> Delta:
        """As in CallReader."""
        delta = Delta()
        self._held += text
        while self._held and self._reading(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """As in CallReader."""
        held, self._held = self._held, ""
        return Delta(held if self._reading == self._content else "")

    def _content(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, DEEPSEEK_MARKS[:2])
        delta.content += before
        if mark is not None:
            self._reading = self._name if mark == DEEPSEEK_MARKS[1] else self._gap
        return mark is not None

    def _gap(self, delta: Delta) -> bool:
        """Between two calls there is nothing."""
        del delta
        _, mark, self._held = cut_at(self._held, DEEPSEEK_MARKS[1:2])
        if mark is not None:
            self._reading, self._head = self._name, ""
        return mark is not None

    def _name(self, delta: Delta) -> bool:
        before, mark, self._held = cut_at(self._held, DEEPSEEK_MARKS[2:3])
        self._head += before
        if mark is None:
            return False
        if self._head.strip() == "function":
            self._reading, self._head = self._line, ""
        else:
            self._begin(self._head, delta)
        return True

    def _line(self, delta: Delta) -> bool:
        """The name on a line of its own."""
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
        """Whatever stands before the arguments."""
        del delta
        place = self._held.find("{")
        self._held = self._held[place:] if place >= 0 else ""
        if place >= 0:
            self._reading = self._arguments
        return place >= 0

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


class NamedReader(CallReader):
    """All of the text is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        """As in CallReader."""
        name, self._name = self._name, None
        return Delta(calls=[CallPart(0, name, text)])

    def finish(self) -> Delta:
        """As in CallReader."""
        return Delta()
