"""A gateway with both facades, and a client of each."""

import pytest

from tests.support.gateway.router_clients import SglangClient, VllmClient
from tests.support.gateway.services import Gateway


@pytest.fixture(scope="module")
def gateway(folder, target, draft):
    process = Gateway(folder, [target.address], [draft.address], grpc_facades=["vllm", "sglang"]).wait()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def vllm(channel):
    return VllmClient(channel)


@pytest.fixture(scope="module")
def sglang(channel):
    return SglangClient(channel)


@pytest.fixture(params=["vllm", "sglang"])
def engine(request, vllm, sglang):
    return {"vllm": vllm, "sglang": sglang}[request.param]
