"""The page at `/`: a chat that shows the speculation of every answer. Static files that use the public API."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

FILES = "/page/"
_FOLDER = Path(__file__).parents[2] / "page"
_HEADERS = {"content-security-policy": "default-src 'self'; img-src 'self' data:", "cache-control": "no-cache"}


def starting_page() -> bytes:
    """The page while the gateway starts; it reloads itself."""
    return (_FOLDER / "starting.html").read_bytes()


def install(app: FastAPI) -> None:
    """Add the routes to an app."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    app.mount(FILES.rstrip("/"), StaticFiles(directory=_FOLDER), name="page")
