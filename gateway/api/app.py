"""The REST routes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from gateway.api.answers import errors
from gateway.api.answers.choice_format import Voice
from gateway.api.answers.completions import CHAT, COMPLETION, Answer, Kind, Telling
from gateway.api.answers.streaming import respond
from gateway.api.middleware import REQUEST_ID
from gateway.api.requests import bodies
from gateway.api.requests.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.api.requests.unicode import WHOLE
from gateway.api.routes import control as controlling
from gateway.api.routes import docs, health, native, page, tokens
from gateway.api.routes.chats import Chats
from gateway.api.routes.native import NativeBody
from gateway.api.routes.responses import ResponseReply, ResponsesBody
from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.orchestration.generator import Generator
from gateway.telemetry import exposition
from outrider.errors import InvalidRequest, ModelNotFound

# Of routes that answer with events, too, for the OpenAPI page.
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The whole answer; with `stream`, events.",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}
_TIMEOUT = "x-request-timeout"  # a header, in seconds


def build(generator: Generator, facts: Facts, control: Control) -> FastAPI:
    """The app with all routes. facts: what the gateway tells of itself."""
    app = FastAPI(
        title="Outrider",
        version=facts.version,
        redirect_slashes=False,
        responses=errors.RESPONSES,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = bodies.Route
    errors.describe(app)
    errors.install(app)
    chats = Chats(generator, facts.config)
    _openai_routes(app, generator, facts, chats)
    _native_routes(app, generator)
    _facts_routes(app, generator, facts)
    health.install(app, generator)
    tokens.install(app, generator, chats)
    page.install(app)
    docs.install(app)
    controlling.install(app, control, generator, facts)
    return app


def _openai_routes(app: FastAPI, generator: Generator, facts: Facts, chats: Chats) -> None:
    @app.post("/v1/chat/completions", tags=["generation"], responses=_STREAMS, dependencies=[WHOLE])
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """The assistant's answer to a conversation."""
        generator.check_model(body.model)
        body.check_supported()
        tools = body.offered()
        prompt = body.cut(
            await chats.prompt(body.messages, tools, body.template_options()), generator.max_session_tokens
        )
        voices = chats.voices(body, tools, prompt)
        if voices is not None and chats.marks_are_special:
            body.skip_special_tokens = False
        return await _answer(generator, facts, CHAT, body, [(prompt, "")], request, voices)

    @app.post("/v1/completions", tags=["generation"], responses=_STREAMS, dependencies=[WHOLE])
    async def completions(body: CompletionBody, request: Request) -> Response:
        """What follows prompts, which are texts or token ids."""
        generator.check_model(body.model)
        body.check_supported()
        given = body.prompts()
        whole = await generator.encode_all(given, special=body.add_special_tokens is not False)
        prompts = [body.cut(tokens, generator.max_session_tokens) for tokens in whole]
        texts = await _texts(generator, given, whole, prompts) if body.echoes else [""] * len(prompts)
        return await _answer(generator, facts, COMPLETION, body, list(zip(prompts, texts, strict=True)), request)

    @app.post("/v1/responses", tags=["generation"], responses=_STREAMS, dependencies=[WHOLE])
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The answer to a conversation, in the form that follows chats. Nothing is kept."""
        generator.check_model(body.model)
        body.check_supported()
        body.timeout = body.timeout or _timeout(request)
        whole = await chats.prompt(body.messages(), None, body.template_options(), body.prompt_field)
        prompt = body.cut(whole, generator.max_session_tokens)
        reply = ResponseReply(
            body,
            body.request(prompt, generator.defaults),
            generator.tokenizer.pieces,
            request_id=body.request_id or body.rid or request.scope[REQUEST_ID],
            model=generator.name,
            detail=facts.config.per_request_spec_decode_metrics,
        )
        return await respond(request, reply, generator, stream=bool(body.stream), failed=reply.failed)


def _native_routes(app: FastAPI, generator: Generator) -> None:
    @app.post("/generate", tags=["generation"], responses=_STREAMS, dependencies=[WHOLE])
    async def generate(body: NativeBody, request: Request) -> Response:
        """SGLang's own form: text or token ids in and out."""
        body.check_supported()
        prompts = await generator.encode_all(body.prompts())
        answers = native.wanted(body, prompts, request.scope[REQUEST_ID], _timeout(request), generator.defaults)
        pieces = generator.tokenizer.pieces
        reply = native.NativeReply(answers, pieces, several=body.several, texts=body.return_text_in_logprobs)
        return await respond(request, reply, generator, stream=body.stream)


def _facts_routes(app: FastAPI, generator: Generator, facts: Facts) -> None:
    started = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(generator, started)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        # A name may be a path, whose first slash gets lost among others.
        if name.strip("/") not in (generator.name.strip("/"), "default"):
            raise ModelNotFound(f"the model `{name}` is not served here; ask for `{generator.name}`", param="model")
        return _json(_model(generator, started))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The figures of all workers, where there are several."""
        page = await exposition.collect(generator.metrics, facts.peers)
        return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        return _json(facts.server_info(generator))

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": facts.version})


async def _texts(
    generator: Generator, given: Sequence[str | list[int]], whole: Sequence[list[int]], prompts: Sequence[list[int]]
) -> list[str]:
    """Texts of prompts: as they came, but for those that came as tokens, or were cut.

    given: as they came. whole, prompts: their tokens, before and after they were cut. Raises InvalidRequest
    """
    texts = {i: one for i, one in enumerate(given) if isinstance(one, str) and len(prompts[i]) == len(whole[i])}
    others = [i for i in range(len(given)) if i not in texts]
    decoded = await generator.decode_all([prompts[i] for i in others])
    texts |= dict(zip(others, decoded, strict=True))
    return [texts[i] for i in range(len(given))]


async def _answer(
    generator: Generator,
    facts: Facts,
    kind: Kind,
    body: GenerationBody,
    prompts: Sequence[tuple[list[int], str]],
    request: Request,
    new_voice: Callable[[], Voice] | None = None,
) -> Response:
    """Start a generation for each try at each prompt, and answer with those to be told. prompts: tokens and text."""
    body.timeout = body.timeout or _timeout(request)
    defaults = generator.defaults
    wanted = [one for prompt, _ in prompts for one in body.request(prompt, defaults).choices(body.tries)]
    telling = Telling(
        generator.tokenizer.pieces,
        ids=body.return_token_ids,
        by_id=bool(body.return_tokens_as_token_ids),
        echo=[text for _, text in prompts for _ in range(body.tries)] if body.echoes else (),
        prompt_logprobs=body.prompt_logprobs is not None,
        steps=body.reports_steps,
        detail=facts.config.per_request_spec_decode_metrics,
        usage=body.include_usage,
        usages=body.continuous_usage,
    )
    answer = Answer(
        kind,
        wanted,
        telling,
        request_id=body.request_id or body.rid or request.scope[REQUEST_ID],
        model=generator.name,
        fingerprint=facts.fingerprint,
        per_prompt=body.tries,
        told=body.choices,
        new_voice=new_voice,
    )
    return await respond(request, answer, generator, stream=bool(body.stream))


def _timeout(request: Request) -> float | None:
    """Seconds that the caller gives the answer, by a header. Raises InvalidRequest."""
    given = request.headers.get(_TIMEOUT)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(f"{_TIMEOUT} must be a number of seconds above 0, not {given}", param=_TIMEOUT)
    return seconds


def _model(generator: Generator, created: int) -> dict[str, Any]:
    return {
        "id": generator.name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "max_model_len": generator.max_session_tokens,
    }


def _json(content: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status_code=status, media_type="application/json")
