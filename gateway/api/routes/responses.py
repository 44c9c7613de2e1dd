"""OpenAI's /v1/responses. The gateway stores nothing, so every request carries the whole conversation."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.api.answers.responses import ResponsesReply
from gateway.api.answers.streaming import respond
from gateway.api.requests.http import REQUEST_ID, VALID_UNICODE, timeout_of
from gateway.api.requests.responses import ResponsesBody
from gateway.api.routes.completions import STREAMS
from gateway.api.routes.conversations import AllConversations
from gateway.control.models import Models


def install(app: FastAPI, models: Models, conversations: AllConversations) -> None:
    """Add the route to an app."""

    @app.post("/v1/responses", tags=["generation"], responses=STREAMS, dependencies=[VALID_UNICODE])
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """The answer to a conversation, in the API that succeeds chat completions. Nothing is stored."""
        model = models.choose(body.model)
        generator = model.generator
        body.check_supported()
        timeout = timeout_of(request)
        of_model = conversations.of(model)
        whole = await of_model.prompt(body.messages(), None, body.template_options(), body.prompt_field)
        wanted = body.request(body.cut(whole, generator.max_session_tokens), generator.defaults, timeout)
        request_id = body.request_id or body.rid or request.scope[REQUEST_ID]
        reply = ResponsesReply(
            body,
            wanted,
            generator.tokenizer.pieces,
            request_id=request_id,
            model=generator.answered_as(body.model),
            detail=model.facts.config.per_request_spec_decode_metrics,
        )
        generations = await generator.start_all([(wanted, request_id)])
        return await respond(request, reply, generations, stream=bool(body.stream), failed=reply.failed)
