"""Chat templates: Jinja in a sandbox, with the extensions that published templates use."""

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
    """`{% generation %}`, which marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders conversations in the format that the model was trained on."""

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """source: the template, None without one. special_tokens: by name, such as bos_token. Raises ConfigError.

        with_tools: a separate template for conversations with tools, or None
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
        """The prompt of a conversation, up to the assistant's next message. Raises InvalidRequest.

        continue_final_message: end the prompt with the last message's text, which the answer continues
        """
        template = self._with_tools if options.get("tools") else self._template
        if template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        # Published templates test `tools is not none`, which is true for an undefined name.
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        try:
            text = template.render(**(defaults | options | {"messages": messages}))
        except Exception as error:  # templates are programs and raise errors of any type
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        return _until_end_of(messages[-1]["content"], text) if continue_final_message else text


def _until_end_of(content: str, text: str) -> str:
    """The text up to the end of the last message's content, which many templates strip. Raises InvalidRequest."""
    for wanted in (content, content.strip()):
        if wanted and (place := text.rfind(wanted)) >= 0:
            return text[: place + len(wanted)]
    raise InvalidRequest(
        "the chat template drops the last message, so it cannot be continued", param="continue_final_message"
    )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with the arguments of transformers, in their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
