"""Tokenizer routes, with the fields and answers of both vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from gateway.api.answers.json_response import json_response
from gateway.api.requests.fields import BOUNDED, Count, Flag, Items
from gateway.api.requests.http import VALID_UNICODE
from gateway.api.requests.messages import Message, conversation_options
from gateway.api.requests.tools import tools_of
from gateway.api.routes.conversations import AllConversations
from gateway.control.models import Models
from gateway.text.encoding import encode, encode_all, run_in_thread_if_long
from outrider.errors import InvalidRequest


class TokenizeBody(BaseModel):
    """POST /tokenize: a text, several texts, or a conversation."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    prompt: str | Items[str] | None = None
    messages: Annotated[Items[Message] | None, BOUNDED] = Field(None, min_length=1)
    add_special_tokens: Flag = True
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    return_token_strs: Flag | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize: token ids, or several lists of them."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: Items[Count] | Items[Items[Count]]
    skip_special_tokens: Flag = True


def install(app: FastAPI, models: Models, conversations: AllConversations) -> None:
    """Add the routes to an app."""

    @app.post("/tokenize", tags=["tokens"], dependencies=[VALID_UNICODE])
    @app.post("/v1/tokenize", tags=["tokens"], include_in_schema=False, dependencies=[VALID_UNICODE])
    async def tokenize(body: TokenizeBody) -> Response:
        """Token ids of a text, of several texts, or of a conversation with its tools."""
        model = models.choose(body.model)
        generator = model.generator
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("send either `prompt` or `messages`", param="prompt")
        limit = {"max_model_len": generator.max_session_tokens}
        if isinstance(body.prompt, list):
            lists = await encode_all(generator.tokenizer, body.prompt, special=body.add_special_tokens)
            return json_response({"tokens": lists, "count": [len(tokens) for tokens in lists], **limit})
        if body.messages is not None:
            options = conversation_options(
                body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
            )
            of_model = conversations.of(model)
            tokens = await of_model.prompt(body.messages, tools_of(body.tools, None, None), options)
        else:
            tokens = await encode(generator.tokenizer, body.prompt or "", special=body.add_special_tokens)
        strings: dict[str, Any] = {}
        if body.return_token_strs:
            pieces = generator.tokenizer.pieces
            strings["token_strs"] = await run_in_thread_if_long(
                [tokens], lambda: [pieces.text(token) for token in tokens]
            )
        return json_response({"tokens": tokens, "count": len(tokens), **limit, **strings})

    @app.post("/detokenize", tags=["tokens"])
    @app.post("/v1/detokenize", tags=["tokens"], include_in_schema=False)
    async def detokenize(body: DetokenizeBody) -> Response:
        """The text of token ids: `prompt` with special tokens, `text` without them by default."""
        generator = models.choose(body.model).generator
        several = bool(body.tokens) and isinstance(body.tokens[0], list)
        lists: list[Any] = list(body.tokens) if several else [body.tokens]
        whole = await generator.decode_all(lists, "tokens", verbatim=True)
        plain = await generator.decode_all(lists, "tokens") if body.skip_special_tokens else whole
        return json_response({"prompt": whole, "text": plain} if several else {"prompt": whole[0], "text": plain[0]})

    @app.get("/tokenizer_info", tags=["tokens"])
    async def tokenizer_info(model: str | None = None) -> Response:
        """The tokenizer's settings, including its chat template."""
        return JSONResponse(
            models.choose(model).generator.tokenizer.settings
        )  # settings may have integers beyond 64 bits, which orjson refuses
