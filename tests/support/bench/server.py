"""A simulated OpenAI-style server over real sockets, which behaves like several servers and fails on demand.

The text of a prompt selects the behaviour:

    429, 500  that HTTP status
    broken    the connection is aborted within the stream
    short     the stream ends early without an error
    error     an error event in the stream
    garbage   an event that is not JSON
    list      an event that is not an object
    odd       a chunk with a choice that is not an object
    empty     only chunks without text
    bare      no usage
    llama     llama.cpp's timings instead of usage
    slow      no end
    tail      as many chunks without text after those with text
    tool      a tool call and no text
    thoughts  reasoning in both fields, before each word
    cut       finish reason `abort`

Any other text gets a normal answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from aiohttp import web

WORDS = ["Once", " upon", " a", " time", " é"]
STEP = 0.01  # seconds between pieces
# Two tokens per piece: a step with three draft tokens accepts one.
TOKENS, DRAFTED, ACCEPTED = 2 * len(WORDS), 3 * len(WORDS), len(WORDS)


class Server:
    """Records requests, and the maximum of concurrent ones (`most`)."""

    def __init__(self) -> None:
        self.flushed = 0
        self.requests: list[dict[str, Any]] = []
        self.running = self.most = self.drafts = 0
        self.over = asyncio.Event()

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") == "Bearer wrong":
            return web.json_response({"error": {"message": "no such key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "tiny"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        lines = ["# HELP vllm:spec_decode_num_drafts_total x", "# TYPE vllm:spec_decode_num_drafts_total counter"]
        name = "vllm:spec_decode_num"
        values = {"drafts": 1, "draft_tokens": 3, "accepted_tokens": 1}
        lines += [f'{name}_{what}_total{{engine="0"}} {self.drafts * n}' for what, n in values.items()]
        shares = {0: 1, 1: 0, 2: 0}
        lines += [
            f'{name}_accepted_tokens_per_pos_total{{engine="0",position="{p}"}} {self.drafts * n}'
            for p, n in shares.items()
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def flush(self, _: web.Request) -> web.Response:
        self.flushed += 1
        return web.Response(text="flushed")

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if text in ("429", "500"):
                error = {"error": {"message": f"no [/red]: {text}", "type": "x", "code": None}}
                return web.json_response(error, status=int(text), headers={"retry-after": "1"})
            return await self.stream(request, body, text) if body["stream"] else self.whole(text)
        finally:
            self.running -= 1

    def whole(self, text: str) -> web.Response:
        self.drafts += len(WORDS)
        choice = {"message": {"role": "assistant", "content": "".join(WORDS)}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": usage(text)})

    async def stream(self, request: web.Request, body: dict[str, Any], text: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def send(event: dict[str, Any] | str) -> None:
            data = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
            # Split within a character or a line break.
            raw = f"data: {data}\r\n\r\n".encode()
            await response.write(raw[:-7])
            await response.write(raw[-7:])

        chat = "messages" in body
        await response.write(b": a comment\n\n")
        if chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        for number, word in enumerate(WORDS):
            await asyncio.sleep(STEP)
            if number == 2:
                if text == "broken":
                    request.transport.abort()
                    return response
                if text == "short":
                    return response
                if text == "error":
                    await send({"error": {"message": "out of pages", "type": "server_error"}})
                if text == "garbage":
                    await send("{nonsense")
                if text == "list":
                    await send("[1, 2]")
                if text == "slow":
                    await self.over.wait()
                if text == "odd":
                    await send({"choices": ["odd"]})
            if text == "thoughts" and chat:
                await send({"choices": [{"delta": {"reasoning": "hm", "reasoning_content": "hm"}}]})
            word = "" if text == "empty" else word
            delta = {"tool_calls": [{"function": {"arguments": word}}]} if text == "tool" else {"content": word}
            await send({"choices": [{"delta": delta} if chat else {"text": word}]})
            self.drafts += 1
        for _ in WORDS if text == "tail" else ():
            await asyncio.sleep(STEP)
            await send({"choices": [{"delta": {"content": ""}, "text": ""}]})
        finish = "abort" if text == "cut" else "length"
        await send({"choices": [{"delta": {}, "text": "", "finish_reason": finish}]})
        if text == "llama":
            timings = {"prompt_n": 7, "predicted_n": TOKENS, "draft_n": DRAFTED, "draft_n_accepted": ACCEPTED}
            await send({"choices": [], "timings": timings})
        elif text != "bare" and body["stream_options"]["include_usage"]:
            await send({"choices": [], "usage": usage(text)})
        await send("[DONE]")
        return response


def usage(text: str) -> dict[str, Any]:
    details = {"accepted_prediction_tokens": ACCEPTED, "rejected_prediction_tokens": DRAFTED - ACCEPTED}
    return {
        "prompt_tokens": len(text.split()),
        "completion_tokens": TOKENS,
        "completion_tokens_details": details,
    }


@contextlib.asynccontextmanager
async def running(server: Server | None = None) -> AsyncIterator[tuple[Server, str]]:
    """A server, by default a new one, and its URL."""
    server = server or Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/metrics", server.metrics)
    app.router.add_post("/flush_cache", server.flush)
    app.router.add_post("/v1/chat/completions", server.answer)
    app.router.add_post("/v1/completions", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield server, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        server.over.set()
        await runner.cleanup()


@contextlib.contextmanager
def in_a_thread(server: Server | None = None) -> Iterator[str]:
    """The URL of a server in a thread, for programs with their own event loop."""
    ready, end = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with running(server) as (_, url):
            found.extend([url, asyncio.get_running_loop()])
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(end.set)
        thread.join(10)
