"""Rewrites GBNF grammars so that llguidance's translation to Lark is correct.

llguidance writes escapes by their code without leading zeros, which Lark cannot read; knows fewer escapes than
xgrammar; does not distinguish rule names by case, or - from _, or a rule `start` from its own; and drops the
parentheses of (x+)?.

All patterns are possessive, and take a text or a range that is not closed as far as the end, so that each character is
read once.
"""

from __future__ import annotations

import re
from collections import Counter

_RULE = re.compile(r"(?m)^[ \t]*+([\w-]++)[ \t]*+::=")
_WORD = re.compile(
    r'"(?:\\.|[^"\\]++)*+"?|\[(?:\\.|[^\]\\]++)*+\]?|#[^\n]*+|[\w-]++', re.DOTALL
)  # ... is a name if no other
_PART = re.compile(_WORD.pattern + r"|\{[^}]*+\}?|[()*+?]", re.DOTALL)
_REPEATS = "*+?{"
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_KNOWN = '"\\nrtxuU'  # escapes that llguidance knows, or rejects as incomplete
_CODES = {"a": 7, "b": 8, "f": 12, "v": 11, "0": 0, "e": 27}
_CAMEL = re.compile(r"([a-z])([A-Z])")


def readable(text: str) -> str:
    """The grammar with escapes and names that llguidance reads; a grammar in Lark's notation is returned unchanged."""
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
    """Insert an empty string into repeated groups that end with a repetition, so that their parentheses are kept."""
    pieces: list[str] = []
    opened: list[int] = []
    closed: int | None = None  # start of the group that was just closed, if it ends with a repetition
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
    """The form under which llguidance identifies names."""
    return _CAMEL.sub(r"\1_\2", name.replace("-", "_")).lower()


def _escape(match: re.Match[str]) -> str:
    digits, other = match[1] or match[2], match[3]
    if digits is not None:
        code = int(digits, 16)
    elif other in _KNOWN or (other.isalnum() and other not in _CODES):
        return match[0]
    else:
        code = _CODES.get(other, ord(other))
    if code < 0x80:
        return f"\\x{code:02x}"
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else match[0]
