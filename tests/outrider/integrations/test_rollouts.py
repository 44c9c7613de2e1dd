"""What a trainer learns of calls that get no answer; tests/system/control/test_rollouts.py has the others."""

import asyncio
import contextlib

import pytest
import torch

from outrider.integrations import rollouts
from outrider.integrations.rollouts import RolloutError, RolloutGateway


async def tensors(count):
    for number in range(count):
        yield f"weight {number}", torch.zeros(100)


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(("count", "error"), [(1, "update them again"), (2, "stays paused until a whole update")])
def test_weights_without_an_answer_may_be_in_place(monkeypatch, count, error, closes):
    """From a gateway that dies within the call, or hangs."""
    monkeypatch.setattr(rollouts, "_UPDATE_SECONDS", 0.1)
    asked = []

    async def answer(reader, writer):
        with contextlib.closing(writer):
            asked.append((await reader.readline()).split()[1].decode().partition("?")[0])
            if not asked[-1].startswith("/update"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            elif not closes:
                await reader.read()  # until the trainer gives up

    async def update():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, RolloutGateway(f"127.0.0.1:{port}") as gateway:
            with pytest.raises(RolloutError, match=f"may have these tensors or not.*{error}"):
                await gateway.update_weights(tensors(count), "4", 500)
            await asyncio.sleep(0.01)

    asyncio.run(update())
    assert asked == [*["/pause_generation"] * (count - 1), "/update_weights_from_tensor"]
