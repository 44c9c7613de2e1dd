"""What a trainer learns of failed updates; tests/system/control/test_rollouts.py has the others."""

import asyncio
import contextlib

import pytest
import torch

from outrider.integrations import rollouts
from outrider.integrations.rollouts import RolloutError, RolloutGateway


async def tensors(count):
    for number in range(count):
        yield f"weight {number}", torch.zeros(100)


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ("closes", "may have these tensors or not"),
        ("hangs", "may have these tensors or not"),
        ("one of two targets", "out of memory.* not the former ones any more"),
    ],
)
@pytest.mark.parametrize(("count", "rest"), [(1, "update them again"), (2, "stays paused until a whole update")])
def test_weights_that_only_some_targets_may_have(monkeypatch, count, rest, update, words):
    """From a gateway that dies within the call or hangs, and from one of which a target fails."""
    monkeypatch.setattr(rollouts, "_UPDATE_SECONDS", 0.1)
    asked = []

    async def answer(reader, writer):
        with contextlib.closing(writer):
            asked.append((await reader.readline()).split()[1].decode().partition("?")[0])
            updated = "/update_weights_from_tensor" in asked
            status, body = "200 OK", b'{"fingerprint": "%d"}' % updated
            if asked[-1].startswith("/update"):
                if update == "closes":
                    return
                if update == "hangs":
                    await reader.read()  # until the trainer gives up
                    return
                status, body = "500 Error", b'{"error": {"message": "out of memory"}}'
            head = [f"HTTP/1.1 {status}", "Connection: close", "Content-Type: application/json"]
            writer.write("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)

    async def send():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, RolloutGateway(f"127.0.0.1:{port}") as gateway:
            with pytest.raises(RolloutError, match=f"{words}.*{rest}"):
                await gateway.update_weights(tensors(count), "4", 500)
            await asyncio.sleep(0.01)

    asyncio.run(send())
    assert ("/pause_generation" in asked) is (count > 1)
    assert "/continue_generation" not in asked
