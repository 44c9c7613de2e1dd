"""The REST app: all routes and the error bodies."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

import outrider
from gateway.admission.admission import Keys
from gateway.api.answers import errors
from gateway.api.middleware import KeyCheck
from gateway.api.requests import http
from gateway.api.routes import completions, docs, generate, health, info, page, responses, tokens, workers
from gateway.api.routes import control as control_routes
from gateway.api.routes.conversations import AllConversations
from gateway.control.models import Models


def build(models: Models, keys: Keys) -> FastAPI:
    """The app with all routes. keys: of administrators."""
    app = _empty()
    conversations = AllConversations(models)
    completions.install(app, models, conversations)
    responses.install(app, models, conversations)
    generate.install(app, models)
    info.install(app, models)
    health.install(app, models)
    tokens.install(app, models, conversations)
    page.install(app)
    docs.install(app)
    control_routes.install(app, models, keys)
    workers.install(app, models, keys)
    return app


class Starting:
    """The app until a target is up: the routes that add and remove replicas, and another app for all other paths."""

    def __init__(self, rest: ASGIApp, models: Models, keys: Keys) -> None:
        app = _empty()
        workers.install(app, models, keys)
        self._workers = KeyCheck(app, keys)
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        own = scope["type"] == "http" and scope["path"].startswith(workers.PATHS)
        await (self._workers if own else self._rest)(scope, receive, send)


def _empty() -> FastAPI:
    app = FastAPI(
        title="Outrider",
        version=outrider.__version__,
        redirect_slashes=False,
        responses=errors.RESPONSES,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = http.Route
    errors.describe(app)
    errors.install(app)
    return app
