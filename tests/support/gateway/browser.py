"""A headless Chromium, controlled by the Chrome DevTools Protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import time
from pathlib import Path
from typing import Any, Self

import aiohttp

_TIMEOUT = 60.0  # seconds


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
        port_file = self._folder / "DevToolsActivePort"
        end = time.monotonic() + _TIMEOUT
        while not (port_file.exists() and port_file.read_text().count("\n")):
            assert self._process.returncode is None, "Chromium has ended"
            assert time.monotonic() < end, "Chromium does not start"
            await asyncio.sleep(0.1)
        port = port_file.read_text().splitlines()[0]
        async with self._http.get(f"http://127.0.0.1:{port}/json/list") as response:
            pages = await response.json()
        return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            elif event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                self.complaints.append(event["params"]["entry"]["text"])

    async def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        event = await asyncio.wait_for(answer, _TIMEOUT)
        assert "error" not in event, event
        result: dict[str, Any] = event["result"]
        return result

    async def open(self, url: str) -> None:
        """Open a page, and wait until it is loaded."""
        await self._call("Page.navigate", url=url)
        await self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _TIMEOUT
        while not await self.run(condition):
            assert time.monotonic() < end, f"{condition} does not become true; complaints: {self.complaints}"
            await asyncio.sleep(0.1)

    async def dark(self, *, dark: bool) -> None:
        """Set the preferred color scheme."""
        value = "dark" if dark else "light"
        await self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    async def picture(self) -> bytes:
        """A screenshot, as PNG."""
        shot = await self._call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])
