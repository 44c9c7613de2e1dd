"""A headless Chromium, spoken to in its own protocol (Chrome DevTools Protocol, over a WebSocket)."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

_PATIENCE = 60.0  # seconds


class Browser:
    """One page. Use: `async with Browser(program, folder) as browser`. complaints: errors of the page's scripts."""

    def __init__(self, program: str, folder: Path, size: tuple[int, int] = (1280, 860)) -> None:
        """folder: for its profile. size: of the window, in pixels."""
        self._command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "about:blank",
            "--remote-debugging-port=0", f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}",
        ]  # fmt: skip
        self._folder = folder
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []

    async def __aenter__(self) -> Self:
        nothing = asyncio.subprocess.DEVNULL
        self._process = await asyncio.create_subprocess_exec(*self._command, stdout=nothing, stderr=nothing)
        self._http = aiohttp.ClientSession()
        self._socket = await self._http.ws_connect(await self._page(), max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self._call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.cancel()
        await self._socket.close()
        await self._http.close()
        self._process.terminate()
        await self._process.wait()

    async def _page(self) -> str:
        """Address of the first page's socket."""
        told = self._folder / "DevToolsActivePort"
        end = time.monotonic() + _PATIENCE
        while not (told.exists() and told.read_text().count("\n")):
            assert self._process.returncode is None, "Chromium has ended"
            assert time.monotonic() < end, "Chromium does not start"
            await asyncio.sleep(0.1)
        port = told.read_text().splitlines()[0]
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as response:
            pages = await response.json()
        return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(answer, _PATIENCE)
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is there."""
        await self._call("Page.navigate", url=url)
        await self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + _PATIENCE
        while not await self.run(condition):
            assert time.monotonic() < end, f"{condition} does not become true; complaints: {self.complaints}"
            await asyncio.sleep(0.1)

    async def dark(self, *, dark: bool) -> None:
        """Whether the user likes dark pages."""
        value = "dark" if dark else "light"
        await self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def picture(self) -> bytes:
        """A picture of what is seen, as PNG."""
        shot = await self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])
