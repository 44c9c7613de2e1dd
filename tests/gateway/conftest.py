"""One gateway over one fake target and one fake draft, shared by the tests of a module that do not break it."""

import grpc
import pytest

from tests.support.gateway.services import Draft, Gateway, Service, Target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def target(folder):
    service = Service(Target, f"unix:{folder}/target", delay=0.002).start()  # hints need time to come
    yield service
    service.stop()


@pytest.fixture(scope="module")
def draft(folder):
    service = Service(Draft, f"unix:{folder}/draft").start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def gateway(folder, target, draft):
    process = Gateway(folder, [target.address], [draft.address]).wait()
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="module")
def channel(gateway):
    """To the gRPC port of the module's gateway."""
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield channel


@pytest.fixture
def hints_in_time(target, monkeypatch):
    """Steps so slow that hints are there, whatever else the machine does."""
    monkeypatch.setattr(target.engine, "delay", 0.03)
