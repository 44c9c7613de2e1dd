"""The page at `/`: a chat that shows how answers come about. Static files, which ask the same routes as all clients."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

FILES = "/page/"
_FOLDER = Path(__file__).parents[2] / "page"
_HEADERS = {"content-security-policy": "default-src 'self'; img-src 'self' data:", "cache-control": "no-cache"}


def starting_page() -> bytes:
    """What stands in the page's place until there is something to ask; it looks again by itself."""
    return (_FOLDER / "starting.html").read_bytes()


def install(app: FastAPI) -> None:
    """Add the routes."""

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(_FOLDER / "index.html", headers=_HEADERS)

    app.mount(FILES.rstrip("/"), StaticFiles(directory=_FOLDER), name="page")
