"""One gateway with a fake target and a fake draft, shared by the tests of a module that keep it running."""

import grpc
import pytest

from tests.support.gateway.services import Draft, Gateway, Service, Target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def target(folder):
    service = Service(Target, f"unix:{folder}/target", delay=0.002).start()  # proposals need time to arrive
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
    """A channel to the gRPC port of the module's gateway."""
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        yield channel


@pytest.fixture
def proposals_in_time(target, monkeypatch):
    """Steps slow enough for proposals to arrive in time on a loaded machine."""
    monkeypatch.setattr(target.engine, "delay", 0.03)
