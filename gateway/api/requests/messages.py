"""Messages of a conversation in OpenAI's API, and the variables of chat templates."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from gateway.api.requests.fields import Items
from outrider.errors import InvalidRequest


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionBody(BaseModel):
    """The function in a call of an earlier answer."""

    name: str
    arguments: str | dict[str, Any] | None = "{}"  # some clients send null for none


class CallBody(BaseModel):
    """A call in an earlier answer."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"] = "function"
    id: str | None = None
    function: FunctionBody

    def rendered(self) -> dict[str, Any]:
        """The call as chat templates expect it."""
        arguments = self.function.arguments or "{}"
        try:
            parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            parsed = arguments  # the model's own text
        return {"type": self.type, "id": self.id, "function": {"name": self.function.name, "arguments": parsed}}


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | Items[TextPart] | None = None
    tool_calls: Items[CallBody] | None = None

    def rendered(self) -> dict[str, Any]:
        """The message as chat templates expect it: content as one text, a line per part, arguments as objects."""
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        calls = {"tool_calls": [call.rendered() for call in self.tool_calls]} if self.tool_calls else {}
        return {**(self.model_extra or {}), "role": role, "content": text, **calls}


def conversation_options(
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: dict[str, Any] | None,
) -> dict[str, Any]:
    """Variables of the chat template besides the messages. Raises InvalidRequest."""
    if continue_final_message and add_generation_prompt:
        raise InvalidRequest(
            "`continue_final_message` and `add_generation_prompt` exclude one another", param="continue_final_message"
        )
    if taken := {"messages", "self"} & (kwargs or {}).keys():
        raise InvalidRequest(f"`chat_template_kwargs` cannot name {min(taken)}", param="chat_template_kwargs")
    begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    options = {"add_generation_prompt": begins, "continue_final_message": bool(continue_final_message)}
    return options | (kwargs or {})
