"""The process that translates grammars and compiles them: `python -m services.target.grammar.sandbox_process`.

It reads a JSON object a line, `{"kind": ..., "text": ..., "seconds": ...}`, and answers each with a line: `{"source":
...}`, the grammar in llguidance's format, or `{"error": ...}`. A grammar that takes more processor time than `seconds`
ends the process, and so does one that takes too much memory: neither Python nor llguidance can be stopped otherwise.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from outrider.errors import InvalidRequest
from outrider.serving.messages import Grammar, GrammarKind
from services.target.grammar.source import refusal, source_of

_BYTES = LLTokenizer("byte")  # automata are made from bytes; only the masks need the model's tokens
_TOKEN = re.compile(r"<[^<>\s\"]++>")  # a token of the model in Lark's notation
_ANY_TOKEN = "<[1]>"
_UNSATISFIABLE = {
    GrammarKind.JSON_SCHEMA: "no text satisfies it: a `$ref` only leads back to itself, or keywords contradict",
    GrammarKind.REGEX: "no text matches it",
    GrammarKind.EBNF: "no text follows from its rules: one of them only leads back to itself",
}
_MEMORY_BYTES = 4 << 30  # of address space
_NICENESS = 5  # below the engine, which may share its cores


def answer(line: bytes) -> dict[str, Any]:
    """The answer to a line."""
    request = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])  # its signal ends the process
    try:
        grammar = Grammar(GrammarKind(request["kind"]), request["text"])
        source = source_of(grammar)
        _compile(grammar, source)
    except InvalidRequest as error:
        return {"error": error.message}
    except BaseException as error:  # a panic of the library is no Exception
        return {"error": f"the grammar cannot be compiled: {error or type(error).__name__}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return {"source": source}


def _compile(grammar: Grammar, source: str) -> None:
    """Compile a grammar. Raises InvalidRequest if no text satisfies it; other errors are left to the target."""
    if grammar.kind is GrammarKind.EBNF and (text := _TOKEN.sub(_ANY_TOKEN, grammar.text)) != grammar.text:
        source = source_of(Grammar(grammar.kind, text))
    start = LLMatcher(_BYTES, source, log_level=0)
    if not start.get_error():
        start.compute_bitmask()
        if start.get_error().startswith("NoExtension"):
            raise refusal(grammar, _UNSATISFIABLE[grammar.kind])


def main() -> None:
    """Answer lines until standard input ends."""
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the target ends first
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # whatever a library prints
        answers.write(b"\n")  # ready
        answers.flush()
        for line in sys.stdin.buffer:
            answers.write(json.dumps(answer(line)).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
