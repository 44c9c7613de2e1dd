"""Chat templates: Jinja in a sandbox, with the extras that published templates use."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import ConfigError, InvalidRequest


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations as the model was trained on them."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """source: None if the model has no template. special_tokens: such as bos_token. Raises ConfigError.

        with_tools: a template of its own for conversations with tools, if the model has one
        """
        self.source, self.with_tools = source, with_tools or source
        self._special_tokens = special_tokens
        extensions: list[type[Extension]] = [loopcontrols, _Generation]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template, self._with_tools = (
                None if one is None else environment.from_string(one) for one in (self.source, self.with_tools)
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template cannot be read: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **options: Any
    ) -> str:
        """The prompt of a conversation, ending where the assistant speaks. Raises InvalidRequest.

        continue_final_message: it ends with the last message's text, which the answer goes on from
        """
        template = self._with_tools if options.get("tools") else self._template
        if template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        # Published templates ask `tools is not none`, which an undefined name would answer wrongly.
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        try:
            text = template.render(**(defaults | options | {"messages": messages}))
        except Exception as error:  # templates are programs, and fail as programs do
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        return _until_end_of(messages[-1]["content"], text) if continue_final_message else text


def _until_end_of(content: str, text: str) -> str:
    """The text up to the end of what the last message says; many templates strip it. Raises InvalidRequest."""
    for wanted in (content, content.strip()):
        if wanted and (place := text.rfind(wanted)) >= 0:
            return text[: place + len(wanted)]
    raise InvalidRequest(
        "the chat template leaves nothing of the last message to go on from", param="continue_final_message"
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it, whose order of arguments is this one."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
