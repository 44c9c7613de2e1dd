"""The gRPC port of the gateway: keys are checked before messages are read, whose size is limited."""

import grpc
import pytest

from gateway.admission.admission import Keys
from gateway.process import listeners
from outrider.config import GatewayConfig
from tests.support.gateway.services import free_port

METHOD = "/outrider.wire.v1.GatewayService/Generate"
KEY = (("authorization", "Bearer secret"),)


@pytest.fixture
async def port():
    """Address of a server with a method that takes any message, and the sizes of those that it has read."""
    config, read = GatewayConfig(api_key=("secret",), max_body_bytes=1000), []

    def parse(content):
        read.append(len(content))
        return content

    async def answer(request, context):
        return b"ok"

    server = listeners._grpc_server(config, Keys(config), shared=False)
    for service in ("outrider.wire.v1.GatewayService", "vllm.grpc.engine.VllmEngine"):
        methods = {name: grpc.unary_unary_rpc_method_handler(answer, parse) for name in ("Generate", "HealthCheck")}
        server.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, methods)])
    address = f"127.0.0.1:{free_port()}"
    await server.start(address, ())
    yield address, read
    await server.stop(0)


async def status(channel, method, message, metadata=None):
    try:
        return await channel.unary_unary(method)(message, metadata=metadata)
    except grpc.aio.AioRpcError as error:
        return error.code()


async def test_nothing_is_read_without_a_key(port):
    address, read = port
    async with grpc.aio.insecure_channel(address) as channel:
        for metadata in (None, (("authorization", "Bearer wrong"),)):
            for message in (b"x", b"x" * (3 << 20)):
                assert await status(channel, METHOD, message, metadata) is grpc.StatusCode.UNAUTHENTICATED
        health = "/vllm.grpc.engine.VllmEngine/HealthCheck"
        assert await status(channel, health, b"") == b"ok", "routers send no key with it"
        assert read == [0]
        assert await status(channel, METHOD, b"x" * 1000, KEY) == b"ok"


async def test_a_message_far_above_the_limit_is_not_read(port):
    address, read = port
    async with grpc.aio.insecure_channel(address) as channel:
        # A smaller one reaches its handler, which names the limit.
        assert await status(channel, METHOD, b"x" * 2000, KEY) == b"ok"
        assert await status(channel, METHOD, b"x" * 2001, KEY) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert read == [2000]
