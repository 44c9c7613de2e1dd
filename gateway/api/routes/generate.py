"""SGLang's native /generate."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.api.answers.native import NativeReply
from gateway.api.answers.streaming import respond
from gateway.api.requests.http import REQUEST_ID, VALID_UNICODE, timeout_of
from gateway.api.requests.native import NativeBody, native_requests
from gateway.api.routes.completions import STREAMS
from gateway.control.models import Models
from gateway.text.encoding import encode_all


def install(app: FastAPI, models: Models) -> None:
    """Add the route to an app."""

    @app.post("/generate", tags=["generation"], responses=STREAMS, dependencies=[VALID_UNICODE])
    async def generate(body: NativeBody, request: Request) -> Response:
        """SGLang's own API: text or token ids in and out."""
        # A single model ignores the name, as SGLang does.
        generator = models.choose(body.model if models.several else None).generator
        body.check_supported()
        prompts = await encode_all(generator.tokenizer, body.prompts())
        requests = native_requests(body, prompts, request.scope[REQUEST_ID], timeout_of(request), generator.defaults)
        pieces = generator.tokenizer.pieces
        reply = NativeReply(requests, pieces, several=body.several, texts=body.return_text_in_logprobs)
        generations = await generator.start_all([(one.request, one.ids) for one in requests])
        return await respond(request, reply, generations, stream=body.stream)
