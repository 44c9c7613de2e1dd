"""Grammars in GBNF's notation, in words that llguidance turns into Lark's.

It writes every escape by its code without the zeros before it, which Lark cannot read; knows fewer escapes than
xgrammar; tells the names of rules apart neither by case nor by - and _, nor one `start` from its own; and writes
(x+)? without the parentheses.
"""

from __future__ import annotations

import re
from collections import Counter

_RULE = re.compile(r"(?m)^[ \t]*([\w-]+)[ \t]*::=")
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)  # ... is a name if no other
_PART = re.compile(_WORD.pattern + r"|\{[^}]*\}|[()*+?]", re.DOTALL)
_REPEATS = "*+?{"
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_KEPT = '"\\nrtxuU'  # escapes that llguidance knows, or refuses as incomplete
_CODES = {"a": 7, "b": 8, "f": 12, "v": 11, "0": 0, "e": 27}
_CAMEL = re.compile(r"([a-z])([A-Z])")


def readable(text: str) -> str:
    """The grammar with escapes and names as llguidance reads them; one in Lark's notation stays as it is."""
    names = dict.fromkeys(_RULE.findall(text))
    if not names:
        return text
    forms = Counter(map(_form, names))
    others = {name: f"{name}-{i}" for i, name in enumerate(names) if forms[_form(name)] > 1 or _form(name) == "start"}
    others.pop("root", None)

    def word(match: re.Match[str]) -> str:
        found = match[0]
        return _ESCAPE.sub(_escape, found) if found[0] in '"[' else others.get(found, found)

    return _grouped(_WORD.sub(word, text))


def _grouped(text: str) -> str:
    """With an empty text in groups that are repeated and end with what is repeated, so that they remain groups."""
    pieces: list[str] = []
    opened: list[int] = []
    closed: int | None = None  # where the group begins that was just closed, if it ends with what is repeated
    end, last = 0, "("
    for match in _PART.finditer(text):
        pieces += text[end : match.start()], match[0]
        end, part = match.end(), match[0][0]
        if part == "#":
            continue
        inner, closed = closed, None
        if part in _REPEATS and inner is not None:
            pieces[inner] = '("" '
        if part == "(":
            opened.append(len(pieces) - 1)
        elif part == ")" and opened:
            first = opened.pop()
            closed = first if last in _REPEATS or inner is not None else None
        last = part
    return "".join(pieces) + text[end:]


def _form(name: str) -> str:
    """What names have in common that llguidance takes for one."""
    return _CAMEL.sub(r"\1_\2", name.replace("-", "_")).lower()


def _escape(match: re.Match[str]) -> str:
    digits, other = match[1] or match[2], match[3]
    if digits is not None:
        code = int(digits, 16)
    elif other in _KEPT or (other.isalnum() and other not in _CODES):
        return match[0]
    else:
        code = _CODES.get(other, ord(other))
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else match[0]
