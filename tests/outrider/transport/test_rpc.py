"""The gRPC server of every service."""

import asyncio

from outrider.transport import rpc
from tests.support.outrider.children import free_port

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _ACKNOWLEDGED = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)), bytes((0, 0, 0, 4, 1, 0, 0, 0, 0))


async def test_a_server_ends_the_connection_of_a_peer_that_is_silent(monkeypatch):
    """As one does that is gone, or behind a cut network; with a hundredth of the product's times."""
    faster = [(name, value // 100 if name.endswith("_ms") else value) for name, value in rpc.SERVER_OPTIONS]
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", faster)
    server, port = rpc.GrpcServer(), free_port()
    await server.start(f"127.0.0.1:{port}", ())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_PREFACE + _SETTINGS + _ACKNOWLEDGED)
        received = await asyncio.wait_for(reader.read(), 10)  # to the end of the connection
        assert b"ping_timeout" in received
        writer.close()
    finally:
        await server.stop(0)
