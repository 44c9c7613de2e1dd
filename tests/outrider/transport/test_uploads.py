"""Uploads keep their answer, whenever it comes: a real server over a Unix domain socket, and clients that write on."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from gateway.control.calls import call_replica
from outrider.errors import ConfigError, InvalidRequest, Unavailable
from outrider.transport.rpc import CHANNEL_OPTIONS
from outrider.transport.uploads import answers_upload, upload
from outrider.wire.v1 import target_pb2, target_pb2_grpc

PART = target_pb2.UpdateWeightsFromTensorRequest(content=bytes(1 << 20))
ANSWER = target_pb2.UpdateWeightsFromTensorResponse()
ANSWER.weights.weight_version = "4"


class Servicer(target_pb2_grpc.TargetServiceServicer):
    """Answers after a number of parts. error: instead of an answer."""

    def __init__(self, parts, error):
        self._parts, self._error, self.read = parts, error, 0

    @answers_upload
    async def UpdateWeightsFromTensor(self, request_iterator, context):
        self.read = 0
        if self._parts:
            async for _ in request_iterator:
                self.read += 1
                if self.read == self._parts:
                    break
        if self._error is not None:
            raise self._error
        return ANSWER


@pytest.fixture
def called(tmp_path):
    """Run a function of a link to a server of a servicer."""
    address = f"unix:{tmp_path}/service"

    def run(servicer, use):
        async def scene():
            server = grpc.aio.server(options=CHANNEL_OPTIONS)
            target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
            server.add_insecure_port(address)
            await server.start()
            link = SimpleNamespace(
                open_channel=lambda: grpc.aio.insecure_channel(address, CHANNEL_OPTIONS),
                service="target", address=address,
            )  # fmt: skip
            try:
                async with asyncio.timeout(60):
                    return await use(link, server)
            finally:
                await server.stop(None)

        return asyncio.run(scene())

    return run


async def send(link, parts):
    """parts: their number; beyond it the sender is silent, and does not end the stream."""

    async def requests():
        for _ in range(parts):
            yield PART
        await asyncio.Event().wait()

    def call(stub):
        return upload(stub.UpdateWeightsFromTensor, requests(), 30)

    return await call_replica(link, target_pb2_grpc.TargetServiceStub, call)


@pytest.mark.parametrize("parts", [0, 1, 5])
def test_a_refusal_while_the_client_writes_keeps_its_status(called, parts):
    """Many times, because gRPC lost it in some: a write that failed beside the status replaced it."""

    async def use(link, _):
        for _ in range(20):
            with pytest.raises(InvalidRequest, match=r"^no room for them$"):
                await send(link, 40)

    called(Servicer(parts, ConfigError("no room for them")), use)


def test_an_answer_before_the_end_of_the_stream_arrives(called):
    async def use(link, _):
        for _ in range(20):
            assert (await send(link, 40)).weights.weight_version == "4"

    called(Servicer(1, None), use)


def test_all_parts_arrive(called):
    servicer = Servicer(-1, None)

    async def use(link, _):
        async def requests():
            for _ in range(9):
                yield PART

        def call(stub):
            return upload(stub.UpdateWeightsFromTensor, requests(), 30)

        assert await call_replica(link, target_pb2_grpc.TargetServiceStub, call) == ANSWER

    called(servicer, use)
    assert servicer.read == 9


def test_a_service_that_dies_during_an_upload_is_unavailable(called):
    servicer = Servicer(-1, None)

    async def use(link, server):
        sending = asyncio.create_task(send(link, 10_000))
        while servicer.read < 20:
            await asyncio.sleep(0.001)
        await server.stop(None)
        with pytest.raises(Unavailable, match="cannot be reached"):
            await sending

    called(servicer, use)


def test_a_sender_s_own_error_ends_the_call(called):
    servicer = Servicer(-1, None)

    async def use(link, _):
        async def requests():
            yield PART
            raise ValueError("the trainer died")

        def call(stub):
            return upload(stub.UpdateWeightsFromTensor, requests(), 30)

        with pytest.raises(ValueError, match="the trainer died"):
            await call_replica(link, target_pb2_grpc.TargetServiceStub, call)

    called(servicer, use)
