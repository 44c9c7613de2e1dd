"""The REST routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive

from gateway.api import errors
from gateway.api.answers import CHAT, COMPLETION, Answer, Kind
from gateway.api.schemas import ChatBody, CompletionBody, GenerationBody
from gateway.facts import Facts
from gateway.generation import Generator
from outrider.errors import ModelNotFound

Result = TypeVar("Result")

_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def build(generator: Generator, facts: Facts) -> FastAPI:
    """The app with all routes. facts: what the gateway tells of itself."""
    app = FastAPI(title="Outrider", version=facts.version, redirect_slashes=False)
    errors.install(app)
    started = int(time.time())

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        generator.check_model(body.model)
        body.check_supported()
        messages = [message.rendered() for message in body.messages]
        prompt = generator.tokenizer.encode_chat(messages, **body.chat_template_kwargs)
        return await _answer(generator, facts, CHAT, body, [prompt], request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        generator.check_model(body.model)
        body.check_supported()
        encode = generator.tokenizer.encode
        prompts = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in body.prompts()]
        return await _answer(generator, facts, COMPLETION, body, prompts, request)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(generator, started)]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in (generator.name, "default"):
            raise ModelNotFound(f"the model `{name}` is not served here; ask for `{generator.name}`", param="model")
        return _json(_model(generator, started))

    @app.get("/health")
    async def health() -> Response:
        missing = generator.orchestrator.missing()
        body = {"status": "ok"} if not missing else {"status": "unavailable", "missing": missing}
        return _json(body, 503 if missing else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generator.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/get_server_info")
    @app.get("/server_info")
    async def server_info() -> Response:
        return _json(facts.server_info(generator))

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": facts.version})

    return app


async def _answer(
    generator: Generator, facts: Facts, kind: Kind, body: GenerationBody, prompts: list[list[int]], request: Request
) -> Response:
    """Open a session for each choice of each prompt, and answer with all of them."""
    wanted = [body.request(prompt, index) for prompt in prompts for index in range(body.choices)]
    sessions = []
    try:
        for one in wanted:
            sessions.append(generator.prepare(one))  # noqa: PERF401 - those opened must be known if one is refused
    except BaseException:
        for session in sessions:
            generator.orchestrator.close(session)
        raise
    sources = [generator.run(session, one.stops) for session, one in zip(sessions, wanted, strict=True)]
    answer = Answer(
        kind,
        sources,
        model=generator.name,
        fingerprint=facts.fingerprint,
        per_prompt=body.choices,
        ids=body.return_token_ids,
    )
    if body.stream:
        events = answer.stream(include_usage=body.include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=_SSE)
    whole = await _unless_gone(request.receive, answer.whole())
    return Response(whole, media_type="application/json")


async def _unless_gone(receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The work's result, or None if the client goes away first, which cancels the work."""

    async def gone() -> None:
        message: Message = {}
        while message.get("type") != "http.disconnect":
            message = await receive()

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for one in (task, watch):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


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
