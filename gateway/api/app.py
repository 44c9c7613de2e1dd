"""The REST app: all routes and the error bodies."""

from __future__ import annotations

from fastapi import FastAPI

from gateway.admission.admission import Keys
from gateway.api.answers import errors
from gateway.api.requests import http
from gateway.api.routes import completions, docs, generate, health, info, page, responses, tokens
from gateway.api.routes import control as control_routes
from gateway.api.routes.conversations import Conversations
from gateway.control.control import Control
from gateway.control.server_info import Facts
from gateway.orchestration.generator import Generator


def build(generator: Generator, facts: Facts, control: Control, keys: Keys) -> FastAPI:
    """The app with all routes. facts: about the gateway, for routes that return them. keys: of administrators."""
    app = FastAPI(
        title="Outrider",
        version=facts.version,
        redirect_slashes=False,
        responses=errors.RESPONSES,
        docs_url=None,
        redoc_url=None,
    )
    app.router.route_class = http.Route
    errors.describe(app)
    errors.install(app)
    conversations = Conversations(generator.tokenizer, facts.config)
    completions.install(app, generator, facts, conversations)
    responses.install(app, generator, facts, conversations)
    generate.install(app, generator)
    info.install(app, generator, facts)
    health.install(app, generator, facts.health(generator))
    tokens.install(app, generator, conversations)
    page.install(app)
    docs.install(app)
    control_routes.install(app, control, generator, facts, keys)
    return app
