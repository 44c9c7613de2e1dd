"""Conversations with this model: how they become prompts, and how its answers are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway.api.answers.choice_format import SpeechVoice, Voice
from gateway.api.requests.messages import Message
from gateway.api.requests.schemas import ChatBody
from gateway.api.requests.tools import Tools, introduced
from gateway.orchestration.generator import Generator
from gateway.parsers.parser import MARKS, Speech, form_of, reasons
from gateway.parsers.reasoning import BEGIN, END, Reasoning, ThinkingTokens
from outrider.config import GatewayOptions
from outrider.errors import InvalidRequest

_TAIL = 8  # tokens at the end of a prompt in which reasoning may be opened


class Chats:
    """What the model's chat template and the flags say of tools and reasoning."""

    def __init__(self, generator: Generator, options: GatewayOptions) -> None:
        self._generator = generator
        tokenizer = generator.tokenizer
        template = tokenizer.template.with_tools
        self._knows_tools = template is not None and "tools" in template
        form = form_of(options.tool_call_parser, template)
        # A template that knows no tools gets them described as text, and calls are asked for in this form.
        self._form = form or ("hermes" if options.tool_call_parser == "auto" else None)
        self._reasons = reasons(options.reasoning_parser, tokenizer.template.source)
        self._always_inside = options.reasoning_parser == "deepseek-r1"
        self._marks = (tokenizer.id_of(BEGIN), tokenizer.id_of(END))

    async def prompt(
        self, messages: Sequence[Message], tools: Tools | None, options: dict[str, Any], field: str = "messages"
    ) -> list[int]:
        """Tokens of a conversation. field: what the client calls it. Raises InvalidRequest."""
        rendered = [message.rendered() for message in messages]
        if not self._knows_tools:
            rendered = introduced(rendered, tools)
        elif tools is not None:
            options = {"tools": tools.offered} | options
        try:
            return await self._generator.encode_chat(rendered, **options)
        except InvalidRequest as error:
            error.param = field if error.param == "messages" else error.param
            raise

    def voices(self, body: ChatBody, tools: Tools | None, prompt: Sequence[int]) -> Callable[[], Voice] | None:
        """What tells the choices of an answer; None if they are content and nothing else."""
        form = self._form
        calls = tools is not None and (tools.forced or form is not None)
        # A form that the answer must have holds from its beginning, and leaves no room to reason unless it says so.
        wanted = body.separate_reasoning or (body.separate_reasoning is None and body.grammar() is None)
        thinks = self._reasons and bool(wanted)
        if not calls and not thinks:
            return None
        inside = thinks and (self._always_inside or self._opened(prompt))

        def voice() -> Voice:
            reader = tools.reader(form or "hermes") if calls and tools is not None else None
            most = None if tools is None or tools.parallel else 1
            speech = Speech(Reasoning(inside=inside) if thinks else None, reader, most_calls=most)
            thinking = ThinkingTokens(*(self._marks if thinks else (None, None)), inside=inside)
            named = tools is not None and tools.named is not None
            return SpeechVoice(speech, thinking, tell_reasoning=body.include_reasoning is not False, named=named)

        return voice

    @property
    def marks_are_special(self) -> bool:
        """True if the marks of calls or reasoning are special tokens, which texts leave out unless told otherwise."""
        special = self._generator.tokenizer.special
        marks = {BEGIN, END, *(MARKS[self._form] if self._form is not None else ())}
        return bool(marks & special)

    def _opened(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends where reasoning has begun."""
        return self._generator.decode(prompt[-_TAIL:], verbatim=True).rstrip().endswith(BEGIN)
