"""OpenAI's /v1/chat/completions and /v1/completions: from the body to running generations, and their reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.api.answers.choice_format import ChoiceFormat
from gateway.api.answers.completions import CHAT, COMPLETION, CompletionReply, Kind, ResponseOptions
from gateway.api.answers.streaming import respond
from gateway.api.requests.http import REQUEST_ID, VALID_UNICODE, timeout_of
from gateway.api.requests.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.api.routes.conversations import AllConversations
from gateway.control.models import Models, Serving
from gateway.orchestration.generator import Generator
from gateway.text.encoding import encode_all

# Routes that may answer with events, for the OpenAPI page.
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer; with `stream`, events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


def install(app: FastAPI, models: Models, all_conversations: AllConversations) -> None:
    """Add the routes to an app."""

    @app.post("/v1/chat/completions", tags=["generation"], responses=STREAMS, dependencies=[VALID_UNICODE])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The assistant's answer to a conversation."""
        model = models.choose(body.model)
        body.check_supported()
        tools, conversations = body.offered, all_conversations.of(model)
        whole = await conversations.prompt(body.messages, tools, body.template_options())
        prompt = body.cut(whole, model.generator.max_session_tokens)
        new_format = conversations.choice_format(body, tools, prompt)
        verbatim = new_format is not None and conversations.markers_are_special
        prompts = [(prompt, "")]
        return await _reply(model, CHAT, body, prompts, request, new_format, verbatim=verbatim)

    @app.post("/v1/completions", tags=["generation"], responses=STREAMS, dependencies=[VALID_UNICODE])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """The continuation of prompts, which are texts or token ids."""
        model = models.choose(body.model)
        generator = model.generator
        body.check_supported()
        given = body.prompts()
        whole = await encode_all(generator.tokenizer, given, special=body.add_special_tokens is not False)
        prompts = [body.cut(tokens, generator.max_session_tokens) for tokens in whole]
        texts = await prompt_texts(generator, given, whole, prompts) if body.echoes else [""] * len(prompts)
        return await _reply(model, COMPLETION, body, list(zip(prompts, texts, strict=True)), request)


async def prompt_texts(
    generator: Generator, given: Sequence[str | list[int]], whole: Sequence[list[int]], prompts: Sequence[list[int]]
) -> list[str]:
    """Texts of prompts: as given, or decoded if they were given as tokens or were cut. Raises InvalidRequest.

    given: as in the request. whole, prompts: their tokens before and after they were cut
    """
    texts = {i: one for i, one in enumerate(given) if isinstance(one, str) and len(prompts[i]) == len(whole[i])}
    others = [i for i in range(len(given)) if i not in texts]
    decoded = await generator.decode_all([prompts[i] for i in others])
    texts |= dict(zip(others, decoded, strict=True))
    return [texts[i] for i in range(len(given))]


async def _reply(
    model: Serving,
    kind: Kind,
    body: GenerationBody,
    prompts: Sequence[tuple[list[int], str]],
    request: Request,
    new_format: Callable[[], ChoiceFormat] | None = None,
    *,
    verbatim: bool = False,
) -> Response:
    """Start a generation for each candidate of each prompt, and reply with the choices. prompts: tokens and text.

    verbatim: special tokens are part of the text, even if the body skips them
    """
    generator, facts = model.generator, model.facts
    timeout, defaults, candidates = timeout_of(request), generator.defaults, body.candidates
    requests = [
        one
        for prompt, _ in prompts
        for one in body.request(prompt, defaults, timeout, verbatim=verbatim).choices(candidates)
    ]
    options = ResponseOptions(
        generator.tokenizer,
        ids=body.return_token_ids,
        by_id=bool(body.return_tokens_as_token_ids),
        echo=[text for _, text in prompts for _ in range(candidates)] if body.echoes else (),
        prompt_logprobs=body.prompt_logprobs is not None,
        steps=body.reports_steps,
        detail=facts.config.per_request_spec_decode_metrics,
        usage=body.include_usage,
        continuous_usage=body.continuous_usage,
    )
    request_id = body.request_id or body.rid or request.scope[REQUEST_ID]
    reply = CompletionReply(
        kind,
        requests,
        options,
        request_id=request_id,
        model=generator.answered_as(body.model),
        fingerprint=facts.fingerprint,
        candidates=candidates,
        choices=body.choices,
        new_format=new_format,
    )
    if candidates > body.choices:  # the reply ranks them by their log-probabilities
        requests = [replace(one, logprobs=one.logprobs or 0) for one in requests]
    generations = await generator.start_all([(one, request_id) for one in requests])
    return await respond(request, reply, generations, stream=bool(body.stream))
