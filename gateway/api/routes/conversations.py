"""Conversations: their prompts by the model's chat template, and the choice format that parses the model's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from gateway.api.answers.choice_format import ChoiceFormat, ParsedChatFormat
from gateway.api.requests.messages import Message
from gateway.api.requests.schemas import ChatBody
from gateway.api.requests.tools import Tools, describe_tools
from gateway.control.models import Models, Serving
from gateway.parsers.output import MARKERS, OutputParser, call_format, has_reasoning
from gateway.parsers.reasoning import BEGIN, END, Reasoning, ReasoningTokenCounter
from gateway.text.encoding import encode_chat
from gateway.text.tokenizer import ModelTokenizer
from outrider.config import GatewayOptions
from outrider.errors import InvalidRequest

_TAIL = 8  # tokens at the end of a prompt in which reasoning may begin


class AllConversations:
    """The conversations of each model."""

    def __init__(self, models: Models) -> None:
        self._made = WeakKeyDictionary[Serving, Conversations]()  # a model may leave
        for model in models:
            if model.running is not None:
                self.of(model.running)

    def of(self, model: Serving) -> Conversations:
        """Those of a model, whose template is read once."""
        if model not in self._made:
            self._made[model] = Conversations(model.generator.tokenizer, model.facts.config)
        return self._made[model]


class Conversations:
    """How this model takes tools and writes calls and reasoning, by its chat template and the flags."""

    def __init__(self, tokenizer: ModelTokenizer, options: GatewayOptions) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.template.with_tools
        self._takes_tools = template is not None and "tools" in template
        form = call_format(options.tool_call_parser, template)
        # A template without tools gets them described as text, which asks for calls in this format.
        self._form = form or ("hermes" if options.tool_call_parser == "auto" else None)
        self._has_reasoning = has_reasoning(options.reasoning_parser, tokenizer.template.source)
        self._always_inside = options.reasoning_parser == "deepseek-r1"

    async def prompt(
        self, messages: Sequence[Message], tools: Tools | None, options: dict[str, Any], field: str = "messages"
    ) -> list[int]:
        """Tokens of a conversation. field: the client's name of it, for errors. Raises InvalidRequest."""
        rendered = [message.rendered() for message in messages]
        if not self._takes_tools:
            rendered = describe_tools(rendered, tools)
        elif tools is not None:
            options = {"tools": tools.offered} | options
        try:
            return await encode_chat(self._tokenizer, rendered, options)
        except InvalidRequest as error:
            error.param = field if error.param == "messages" else error.param
            raise

    def choice_format(
        self, body: ChatBody, tools: Tools | None, prompt: Sequence[int]
    ) -> Callable[[], ChoiceFormat] | None:
        """A function that makes the format of each choice; None if choices are content only."""
        form = self._form
        calls = tools is not None and (tools.forced or form is not None)
        # A grammar holds from the first token, so there is no reasoning unless the request asks for it.
        wanted = body.separate_reasoning or (body.separate_reasoning is None and body.grammar() is None)
        reasons = self._has_reasoning and bool(wanted)
        if not calls and not reasons:
            return None
        inside = reasons and (self._always_inside or self._ends_in_reasoning(prompt))

        def make() -> ChoiceFormat:
            parser = tools.parser(form or "hermes") if calls and tools is not None else None
            max_calls = None if tools is None or tools.parallel else 1
            output = OutputParser(Reasoning(inside=inside) if reasons else None, parser, max_calls=max_calls)
            counter = ReasoningTokenCounter(self._tokenizer.pieces, inside=inside) if reasons else None
            named = tools is not None and tools.named is not None
            return ParsedChatFormat(output, counter, include_reasoning=body.include_reasoning is not False, named=named)

        return make

    @property
    def markers_are_special(self) -> bool:
        """True if a marker of calls or reasoning is a special token, which texts omit by default."""
        markers = {BEGIN, END, *(MARKERS[self._form] if self._form is not None else ())}
        return bool(markers & self._tokenizer.special)

    def _ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """True if a prompt ends with the begin marker of reasoning."""
        return self._tokenizer.decode(prompt[-_TAIL:], verbatim=True).rstrip().endswith(BEGIN)
