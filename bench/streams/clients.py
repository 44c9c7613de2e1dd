"""Minimal clients for load with low CPU use: gRPC, and server-sent events (SSE) over plain sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import orjson

from outrider.wire.v1 import gateway_pb2, gateway_pb2_grpc

_CHUNK = 1 << 16  # bytes


async def over_grpc(port: int, sessions: int, tokens: int) -> float:
    """Generate `tokens` tokens in each of `sessions` concurrent sessions over gRPC. Returns seconds."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)

        async def one(index: int) -> None:
            prompt = gateway_pb2.TokenIds(ids=[index, index + 1])
            request = gateway_pb2.GenerateRequest(token_ids=prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            async for part in stub.Generate(request):
                if part.finish_reason:
                    assert part.completion_tokens == tokens

        return await _timed(one, sessions)


async def over_sse(port: int, sessions: int, tokens: int) -> float:
    """The same over SSE from /v1/completions."""

    async def one(index: int) -> None:
        request = {"prompt": [index, index + 1], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = orjson.dumps(request | {"stream": True, "stream_options": {"include_usage": True}})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(body)}\r\n"
        head += "content-type: application/json\r\nconnection: close\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        last = b""
        while chunk := await reader.read(_CHUNK):
            last = (last + chunk)[-_CHUNK:]
        assert b'"completion_tokens":%d' % tokens in last, last[-400:]
        writer.close()
        await writer.wait_closed()

    return await _timed(one, sessions)


async def _timed(one: Callable[[int], Coroutine[Any, Any, None]], sessions: int) -> float:
    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(sessions)))
    return time.perf_counter() - start
