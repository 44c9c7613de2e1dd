"""Tool calls and reasoning in texts that arrive in pieces."""

import random

import pytest

from gateway.api.requests.messages import Message
from gateway.api.requests.schemas import ChatBody
from gateway.api.routes.conversations import Conversations
from gateway.parsers.json_text import CallObject
from gateway.parsers.output import OutputParser, call_format, has_reasoning
from gateway.parsers.reasoning import Reasoning, ReasoningTokenCounter
from gateway.parsers.tool_calls import (
    DEEPSEEK_MARKERS,
    HERMES_MARKERS,
    DeepSeekParser,
    HermesParser,
    JsonCallsParser,
    NamedCallParser,
)
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayOptions
from outrider.speculation.proposal import FinishReason
from tests.support.gateway.engines import tokenizer_files
from tests.support.gateway.reading import read

SIZES = [1, 2, 3, 5, 11, 1000]
WEATHER = '{"city": "Z\\u00fcrich, \\"old\\" {town}", "days": [1, {"a": 2}]}'


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SENTENCE = "Use the <tool_call> tag, then </tool_call>. Fine."
TWO = [("f", "{}"), ("g", '{"a": 1}')]
HERMES = {
    "plain text": ("no call < here </tool", "no call < here </tool", []),
    "one": (hermes("f", WEATHER), "", [("f", WEATHER)]),
    "behind text": ("Let me see.\n" + hermes("f", "{}"), "Let me see.", [("f", "{}")]),
    "several": (hermes("f", "{}") + "\n" + hermes("g", WEATHER), "", [("f", "{}"), ("g", WEATHER)]),
    "text between": (hermes("f", "{}") + " and " + hermes("g", "{}"), " and", [("f", "{}"), ("g", "{}")]),
    "arguments first": (f'<tool_call>{{"arguments": {WEATHER}, "name": "f"}}</tool_call>', "", [("f", WEATHER)]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "other keys": ('<tool_call>{"id": 7, "name": "f", "x": null, "parameters": {}}</tool_call>', "", [("f", "{}")]),
    "no JSON": ("<tool_call>f(1)</tool_call> done", "<tool_call>f(1)</tool_call> done", []),
    "markers in a sentence": (SENTENCE, SENTENCE, []),
    "a marker at the end": ("x\n\n<tool_call>", "x\n\n<tool_call>", []),
    "a marker within a sentence, then a call": (
        "the <tool_call> tag " + hermes("f", "{}"),
        "the <tool_call> tag",
        [("f", "{}")],
    ),
    "no call in a tag": ('x\n<tool_call>{"a": 1}</tool_call>\ny', 'x\n<tool_call>{"a": 1}</tool_call>\ny', []),
    "two in one tag": ('<tool_call>\n{"name": "f"}\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>', "", TWO),
    "two in one tag, closed too often": (
        '<tool_call>{"name": "f"}},{"name": "g", "arguments": {"a": 1}}]</tool_call>',
        "",
        TWO,
    ),
    "null arguments": ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    "empty arguments": ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [("f", "{}")]),
    "text behind an object": ('<tool_call>{"name": "f"} as you wish</tool_call> so.', "as you wish so.", [("f", "{}")]),
    "never closed": ('<tool_call>{"name": "f"}\nDone. a < b', "Done. a < b", [("f", "{}")]),
    "cut in the end marker": ('a <tool_call>{"name": "f"}</tool_c', "a", [("f", "{}")]),
    "spaces behind": ('Well.\n<tool_call>{"name": "f"}</tool_call>\n', "Well.", [("f", "{}")]),
    "no last mark": (
        '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "content behind": ('<tool_call>{"name": "f"}</tool_call>\nDone.\n', "\nDone.\n", [("f", "{}")]),
    "cut off": ('ok <tool_call>{"name": "f", "arguments": {"a', "ok", [("f", '{"a')]),
    "cut off early": ('ok <tool_call>{"na', 'ok <tool_call>{"na', []),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", HERMES)
def test_hermes(case, size):
    text, content, calls = HERMES[case]
    got_content, got_calls = read(HermesParser, text, size)
    assert got_calls == calls
    assert got_content == content


LLAMA = {
    "plain text": ("hello {not a call}", "hello {not a call}", []),
    "one": (f'{{"name": "f", "parameters": {WEATHER}}}', "", [("f", WEATHER)]),
    "tagged": ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    "several": ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', "", [("f", "{}"), ("g", "{}")]),
    "no tool of ours": ('{"name": "rm", "parameters": {}}', '{"name": "rm", "parameters": {}}', []),
    "an answer in JSON": ('{"city": "x", "n": 3} so', '{"city": "x", "n": 3} so', []),
    "a line's end behind": ('{"name": "f", "parameters": {}}\n', "", [("f", "{}")]),
    "a separator behind": ('{"name": "f", "parameters": {}}; ', "", [("f", "{}")]),
    "cut off": ('{"name": "f", "parameters": {"a": ', "", [("f", '{"a": ')]),
    "cut off early": ('{"na', '{"na', []),
    "no call behind space": (' \n{"x": 1}', ' \n{"x": 1}', []),
    "no call behind a call": ('{"name": "f"}; {"x": 1} so', '; {"x": 1} so', [("f", "{}")]),
    "text behind a call": ('{"name": "f"} and so', " and so", [("f", "{}")]),
    "no call behind the tag": ('<|python_tag|>{"x": 1}', '<|python_tag|>{"x": 1}', []),
    "fails behind its name": ('{"name": "f", "parameters": {"a": 1}, oops', "oops", [("f", '{"a": 1}')]),
    "null": ('{"name": "f", "parameters": null}', "", [("f", "{}")]),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", LLAMA)
def test_llama(case, size):
    text, content, calls = LLAMA[case]
    assert read(lambda: JsonCallsParser({"f", "g"}), text, size) == (content, calls)


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek(name, arguments, fenced):
    head, tail = (f"function<｜tool▁sep｜>{name}\n```json\n", "\n```") if fenced else (f"{name}<｜tool▁sep｜>", "")
    return f"<｜tool▁call▁begin｜>{head}{arguments}{tail}<｜tool▁call▁end｜>"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fenced", [False, True])
def test_deepseek(fenced, size):
    calls = deepseek("f", WEATHER, fenced) + "\n" + deepseek("g", "{}", fenced)
    assert read(DeepSeekParser, "Sure. " + BEGIN + calls + END, size) == ("Sure. ", [("f", WEATHER), ("g", "{}")])
    assert read(DeepSeekParser, "a < b", size) == ("a < b", [])


MARK = "<｜tool▁call▁begin｜>"
DEEPSEEK = {
    "no call": (f"Use {BEGIN} so {END}, or {MARK}.", f"Use {BEGIN} so {END}, or {MARK}.", []),
    "no arguments": (
        BEGIN + deepseek("f", "null", True) + deepseek("g", "{}", True) + END,
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    "nothing at all": (BEGIN + deepseek("f", "", False) + END + " so", " so", [("f", "{}")]),
    "unclosed": (f'{MARK}f<｜tool▁sep｜>{{"a": 1}} so', "so", [("f", '{"a": 1}')]),
    "cut off early": (f"x {BEGIN}{MARK}functi", f"x {BEGIN}{MARK}functi", []),
    "an empty list": (f"x {BEGIN}\n{END} y", f"x {BEGIN}\n{END} y", []),
    "a marker without a name": (f"a {MARK}<｜tool▁call▁end｜> b", f"a {MARK}<｜tool▁call▁end｜> b", []),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", DEEPSEEK)
def test_deepseek_loses_no_text(case, size):
    text, content, calls = DEEPSEEK[case]
    assert read(DeepSeekParser, text, size) == (content, calls)


@pytest.mark.parametrize("size", SIZES)
def test_forced_calls(size):
    text = f'[{{"name": "f", "parameters": {WEATHER}}}, {{"name": "g", "parameters": {{}}}}]'
    assert read(JsonCallsParser, text, size) == ("", [("f", WEATHER), ("g", "{}")])
    assert read(JsonCallsParser, text, size, max_calls=1) == ("", [("f", WEATHER)])
    assert read(lambda: NamedCallParser("h"), WEATHER, size) == ("", [("h", WEATHER)])


PARTS = {
    HermesParser: [*HERMES_MARKERS, '{"name": "f"}', '{"name": "g", "arguments": {"a": [1, "}"]}}', "<tool", "}"],
    DeepSeekParser: [*DEEPSEEK_MARKERS, "f", "function", "```json\n", '{"a": 1}', "\n```", "null", "<｜tool"],
    JsonCallsParser: ['{"name": "f"}', '{"name": "f", ', '"parameters": {"b": ', "; ", "<|python_tag|>", "}", "oops"],
}  # fmt: skip


@pytest.mark.parametrize("parser", PARTS)
def test_texts_of_chance_are_read_the_same_in_any_pieces_and_lose_nothing_without_a_call(parser):
    chance = random.Random(1)
    make = (lambda: JsonCallsParser({"f", "g"})) if parser is JsonCallsParser else parser
    for _ in range(300):
        text = "".join(chance.choices([*PARTS[parser], " ", "\n", "x", '{"a": 1}', ', "'], k=chance.randint(1, 9)))
        got = [read(make, text, size) for size in (1, 2, 3, 7, 1000)]
        assert got == got[:1] * 5, text
        assert got[0][1] or got[0][0] == text


def test_objects_other_than_calls_fail():
    for text in ("x", '{"name": 5}', "{name: 1}", '{"name" 1}', '{"name": nope, '):
        made = CallObject()
        made.push(text)
        assert made.failed or made.name is None


REASONING = {
    "none": (False, "hello <think> x", "", "hello <think> x"),
    "marked": (False, "<think>\nhm < 3\n\n</think>\n\nyes", "hm < 3\n\n", "yes"),
    "opened by the prompt": (True, "hm</think>yes", "hm", "yes"),
    "never closed": (True, "hm </thin", "hm </thin", ""),
    "cut in the marker": (True, "hm </thin", "hm ", "", True),
    "cut at its first character": (True, "a <", "a ", "", True),
    "cut elsewhere": (True, "hm </thin b", "hm </thin b", "", True),
    "cut behind the marker": (True, "hm</think>yes </thi", "hm", "yes </thi", True),
    "empty": (False, "<think>\n\n</think>\n\nyes", "", "yes"),
    "cut off early": (False, "<thi", "", "<thi"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", REASONING)
def test_reasoning(case, size):
    inside, text, reasoning, content, cut = (*REASONING[case], False)[:5]
    parser, got = OutputParser(Reasoning(inside=inside), None), ["", ""]
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    for index, piece in enumerate(pieces):
        output = parser.push(piece, last=index == len(pieces) - 1, cut=cut)
        got[0] += output.reasoning
        got[1] += output.content
    assert got == [reasoning, content]


def test_reasoning_precedes_calls():
    parser = OutputParser(Reasoning(inside=True), HermesParser())
    output = parser.push("<tool_call> is for later</think>" + hermes("f", "{}"), last=True)
    assert output.reasoning == "<tool_call> is for later"
    assert [part.name for part in output.calls if part.name] == ["f"]


# Tokens: 1 and 2 are the markers, 3-6 parts of them, 9 a marker's end with the text behind it.
PIECES = {1: b"<think>", 2: b"</think>", 3: b"<th", 4: b"ink>", 5: b"</", 6: b"think>", 7: b"\n", 8: b"hm"}
PIECES |= {9: b">\n\nSo", 10: b"think", 11: b"<"}


@pytest.mark.parametrize(
    ("inside", "tokens", "count"),
    [
        (True, [8, 8, 8, 2, 8], 4),
        (True, [8, 5, 6, 8, 8], 3),
        (True, [8, 5, 10, 9, 8], 4),
        (True, [8] * 20, 20),
        (True, [8, 5, 10], 3),
        (False, [1, 8, 2, 8], 3),
        (False, [7, 3, 4, 8, 5, 6, 8], 6),
        (False, [3, 4, 8, 8], 4),
        (False, [8, 1, 8, 2], 0),
        (False, [11, 8, 8], 0),
    ],
)
def test_tokens_of_reasoning_are_counted(inside, tokens, count):
    """Whatever the commits are: the vocabulary may have the markers as several tokens."""
    for size in (1, 2, 3, len(tokens)):
        counter = ReasoningTokenCounter(PIECES, inside=inside)
        for i in range(0, len(tokens), size):
            counter.add(tokens[i : i + size])
        assert counter.count == count


@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize(
    ("text", "finish", "reasoning", "content", "count"),
    [
        ("hm, it is so", FinishReason.LENGTH, "hm, it is so", "", "hm, it is so"),
        ("hm </thi", FinishReason.LENGTH, "hm ", "", "hm </thi"),
        ("hm </thi", FinishReason.STOP, "hm </thi", "", "hm </thi"),
        ("hm</think>Yes.", FinishReason.STOP, "hm", "Yes.", "hm</think>"),
    ],
)
def test_reasoning_of_a_vocabulary_without_markers_is_counted_and_cut(text, finish, reasoning, content, count, size):
    """Streamed and whole: the markers are several tokens, and `max_tokens` may end within one."""
    tokenizer = ModelTokenizer(tokenizer_files())
    body = ChatBody(messages=[Message(role="user", content="hi")])
    make = Conversations(tokenizer, GatewayOptions(reasoning_parser="deepseek-r1")).choice_format(body, None, [3])
    choice, streamed, tokens = make(), ["", ""], tokenizer.encode(text)
    for i in range(0, len(tokens), size):
        new = tokens[i : i + size]
        fields = choice.add(tokenizer.decode(new), new, finish if i + size >= len(tokens) else FinishReason.RUNNING)
        delta = {} if fields is None else fields["delta"]
        streamed = [streamed[0] + delta.get("reasoning_content", ""), streamed[1] + delta.get("content", "")]
    message = choice.whole()["message"]
    assert streamed == [message["reasoning_content"], message["content"]] == [reasoning, content]
    assert choice.reasoning_tokens == len(tokenizer.encode(count))


def test_call_formats_are_found_in_templates():
    assert call_format("auto", "{{ tools }} <tool_call>") == "hermes"
    assert call_format("auto", f"{{{{ tools }}}} {BEGIN}") == "deepseek"
    assert call_format("auto", '{{ tools }} {"name": function name, "parameters": ...}') == "llama"
    assert (
        call_format("auto", "{{ messages }}")
        is call_format("auto", None)
        is call_format("none", "tools <tool_call>")
        is None
    )
    assert call_format("llama3", None) == "llama"
    assert has_reasoning("auto", "x </think>")
    assert has_reasoning("qwen3", None)
    assert not has_reasoning("auto", "x")
    assert not has_reasoning("none", "x </think>")
