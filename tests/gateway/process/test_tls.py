"""TLS between the processes and with clients: valid peers are served, others get the reason."""

import asyncio
import contextlib
import datetime as dt
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.process import app as gateway_app
from gateway.streams.connection import Connection
from gateway.streams.draft import DraftLink
from gateway.streams.target import TargetLink
from outrider.cli import main
from outrider.client import Client
from outrider.config import DraftConfig, GatewayConfig, GatewayOptions, ServeConfig, TargetConfig
from outrider.errors import ConfigError, Unavailable
from outrider.placement.cores import CorePlan
from outrider.serving.features import FeatureSpec
from outrider.supervisor import app as supervisor
from outrider.supervisor.display import Display
from outrider.tls import client_tls, explain_tls_failure, read_authorities, server_tls
from outrider.transport.rpc import GrpcServer
from services.draft.process import app as draft_app
from services.draft.train.data.collect import TargetClient
from services.target.process import app as target_app
from tests.support.certificates import Authority
from tests.support.gateway.engines import expected, tokenizer
from tests.support.gateway.services import Draft, Gateway, Service, Target, free_port, model_info, until

A = tokenizer().encode("A").ids
HOUR = dt.timedelta(hours=1)


@pytest.fixture(scope="module")
def ours(folder):
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def others(folder):
    return Authority(folder, "others")


@pytest.fixture(scope="module")
def server(ours):
    return ours.certificate("127.0.0.1", "localhost")


@pytest.fixture(scope="module")
def visitor(ours):
    return ours.certificate("visitor.example")


@contextlib.contextmanager
def running(kind, tls):
    service = Service(kind, f"127.0.0.1:{free_port()}", tls=tls).start()
    try:
        yield service
    finally:
        service.stop()


@pytest.fixture(scope="module")
def closed_target(server, ours):
    """A target that requires certificates of our authority."""
    with running(Target, server.serving(ours.ca_certs)) as service:
        yield service


def context_of(ca_certs, certificate=None):
    context = ssl.create_default_context(cafile=ca_certs)
    if certificate is not None:
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
    return context


# --- the whole way ---


def test_all_connections_use_mutual_tls(folder, ours, server, visitor, closed_target):
    flags = visitor.flags("service_ssl", ours.ca_certs) | server.flags("ssl", ours.ca_certs)
    with running(Draft, server.serving(ours.ca_certs)) as draft:
        gateway = Gateway(
            folder, [closed_target.address], [draft.address], verify=context_of(ours.ca_certs, visitor), **flags
        )
        try:
            gateway.wait()
            gateway.complete("A", max_tokens=20)
            until(lambda: draft.engine.opened == 1)
            assert gateway.text("A", max_tokens=3) == "BCD"
            assert "REST on https://" in gateway.log.read_text()
            for route in ("/pause_generation", "/continue_generation"):  # these open new channels
                assert gateway.client.post(route, headers=gateway.admin).status_code == 200
            _only_with_a_certificate(gateway, ours, visitor)
        finally:
            assert gateway.stop() == 0


def _only_with_a_certificate(gateway, ours, visitor):
    address = f"127.0.0.1:{gateway.grpc_port}"
    with Client(address, tls=visitor.asking(ours.ca_certs)) as client:
        assert client.complete(A, max_tokens=3, temperature=0).token_ids == expected(A, 3)
    for tls in (None, client_tls(ours.ca_certs)):
        with Client(address, tls=tls) as client, pytest.raises(Unavailable):
            client.info()
    for verify in (context_of(ours.ca_certs), context_of(None, visitor)):
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{gateway.url}/health", verify=verify)
    with pytest.raises(httpx.TransportError):
        httpx.get(gateway.url.replace("https", "http"))


def test_certificates_may_have_comments_in_any_letters(folder, ours):
    path = folder / "commented.pem"
    path.write_bytes("Zertifikat für Zürich\n".encode() + Path(ours.ca_certs).read_bytes())
    assert read_authorities(str(path), "--ssl-ca-certs")


def test_tls_without_a_ca_requires_no_client_certificate(folder, ours, server, target):
    gateway = Gateway(folder, [target.address], verify=context_of(ours.ca_certs), **server.flags())
    try:
        gateway.wait()
        assert gateway.text("A", max_tokens=3) == "BCD"
        with Client(f"localhost:{gateway.grpc_port}", tls=client_tls(ours.ca_certs)) as client:
            assert client.info().served_model_name == "counting"
        health = ["healthcheck", gateway.url, "--timeout", "10"]
        assert main([*health, "--service-ssl-ca-certs", ours.ca_certs]) == 0
        assert main(health) == 1, "the authority is not known to this machine"
        # The expected name counts, not that of the address.
        named = ["--service-ssl-ca-certs", ours.ca_certs, "--service-ssl-server-name"]
        assert main([*health, *named, "localhost"]) == 0
        assert main([*health, *named, "gateway.example"]) == 1
        port = f"localhost:{gateway.grpc_port}"
        assert main(["healthcheck", port, "-t", "10", "--service-ssl-ca-certs", ours.ca_certs]) == 0
    finally:
        assert gateway.stop() == 0


# --- services that do not understand the gateway, or it them ---


async def met(link):
    """The result of a link's first attempts: None, or the reason of the refusal."""
    link.start()
    try:
        await link.wait_up(20)
    except ConfigError as error:
        return error.message
    finally:
        await link.stop()


@pytest.mark.parametrize(
    ("tls", "words"),
    [
        (lambda o, x: None, "speaks TLS; name the authority of its certificate with --service-ssl-ca-certs"),
        (lambda o, x: client_tls(o.ca_certs), "asks for a certificate; name one with --service-ssl-certfile"),
        (lambda o, x: x.certificate("y.example").asking(o.ca_certs), "does not accept our certificate"),
        (lambda o, x: client_tls(x.ca_certs), "shows a certificate that is not trusted"),
        (lambda o, x: client_tls(o.ca_certs, server_name="z.example"), "Hostname mismatch"),
    ],
)
async def test_a_refused_gateway_reports_the_reason(closed_target, ours, others, tls, words):
    assert words in await met(TargetLink(closed_target.address, Connection(tls(ours, others))))


async def test_an_expired_certificate_is_named(ours):
    past = dt.datetime.now(dt.UTC) - HOUR
    old = ours.certificate("127.0.0.1", not_before=past - HOUR, not_after=past)
    with running(Target, old.serving()) as target:
        assert "certificate has expired" in await met(TargetLink(target.address, Connection(client_tls(ours.ca_certs))))


async def test_a_service_without_tls_is_reported(ours):
    with running(Target, None) as target:
        assert "speaks no TLS" in await met(TargetLink(target.address, Connection(client_tls(ours.ca_certs))))


async def test_a_certificate_of_another_name_can_be_expected(ours, visitor):
    with running(Target, visitor.serving()) as target:
        named = client_tls(ours.ca_certs, server_name="visitor.example")
        assert await met(TargetLink(target.address, Connection(named))) is None


async def test_a_draft_with_other_tls_settings_is_reported(server):
    with running(Draft, server.serving()) as draft:
        assert "speaks TLS" in await met(DraftLink(draft.address, model_info()))


async def test_other_failures_are_not_attributed_to_tls():
    address = f"127.0.0.1:{free_port()}"
    assert await explain_tls_failure(address, None) is None
    assert await explain_tls_failure("unix:/nowhere", None) is None
    with running(Target, None) as target:
        assert await explain_tls_failure(target.address, None) is None


async def test_a_proxy_without_a_backend_is_not_attributed_to_tls(ours):
    async def end(_, writer):
        writer.close()

    async with await asyncio.start_server(end, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await explain_tls_failure(address, client_tls(ours.ca_certs)) is None
        assert await explain_tls_failure(address, None) is None


async def test_training_reports_the_reason(closed_target, ours):
    writer = TargetClient(closed_target.address, FeatureSpec((), True), client_tls(ours.ca_certs))
    with pytest.raises(ConfigError, match="asks for a certificate"):
        await writer.__aenter__()


@pytest.mark.parametrize(("token", "words"), [(None, "no service token"), ("b" * 20, "another service token")])
async def test_training_needs_the_token_of_the_target(tmp_path, token, words):
    target = Service(Target, f"unix:{tmp_path}/target.sock", token="a" * 20).start()
    try:
        writer = TargetClient(target.address, FeatureSpec((), True), token=token)
        with pytest.raises(ConfigError, match=f"refuses this training: the caller has {words}"):
            await writer.__aenter__()
    finally:
        await asyncio.to_thread(target.stop)


def test_a_refused_gateway_exits(closed_target):
    ports = ["--port", str(free_port()), "--grpc-port", str(free_port())]
    command = [sys.executable, "-m", "gateway", *ports, "--target", closed_target.address]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    assert f"the target at {closed_target.address} speaks TLS" in result.stderr


# --- files ---


def test_files_that_do_not_fit_are_refused_by_flag(tmp_path, ours, others, server):
    other, empty = others.certificate("127.0.0.1"), tmp_path / "empty.pem"
    empty.write_text("nothing\n")
    locked = tmp_path / "locked.key"
    locked.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n")
    cert, key, ca = server.certfile, server.keyfile, ours.ca_certs
    cases = [
        ((cert, None, None, None), "--ssl-certfile needs --ssl-keyfile"),
        ((None, key, None, None), "--ssl-keyfile needs --ssl-certfile"),
        ((None, None, ca, None), "--ssl-ca-certs needs TLS"),
        ((f"{tmp_path}/gone", key, None, None), "gone (--ssl-certfile) cannot be read: No such file"),
        ((cert, f"{tmp_path}/gone", None, None), "gone (--ssl-keyfile) cannot be read: No such file"),
        (
            (cert, other.keyfile, None, None),
            f"the key in {other.keyfile} (--ssl-keyfile) does not match the certificate in",
        ),
        ((str(empty), key, None, None), "empty.pem (--ssl-certfile) holds no certificate"),
        ((cert, str(empty), None, None), "empty.pem (--ssl-keyfile) holds no private key"),
        ((cert, str(locked), None, None), "has a passphrase"),
        ((cert, key, str(empty), None), "empty.pem (--ssl-ca-certs) holds no certificate"),
        ((cert, key, None, 2), "name their authority with --ssl-ca-certs"),
        ((cert, key, ca, 3), "--ssl-cert-reqs is 0"),
    ]
    for given, words in cases:
        with pytest.raises(ConfigError) as caught:
            server_tls(*given)
        assert words in caught.value.message
    with pytest.raises(ConfigError, match="--service-ssl-ca-certs, too"):
        client_tls(None, cert, key)
    with pytest.raises(ConfigError, match="--service-ssl-keyfile"):
        client_tls(ca, cert)
    assert read_authorities(ca, "--x").startswith(b"-----BEGIN")
    assert server_tls(cert, key, ca, None).cert_reqs is ssl.CERT_REQUIRED
    assert server_tls(cert, key, ca, 0).cert_reqs is ssl.CERT_NONE
    assert server_tls(None, None, None, None) is None


async def test_processes_refuse_invalid_files_at_start(folder, ours, server):
    wrong = {"ssl_certfile": server.certfile, "ssl_keyfile": ours.certificate("w.example").keyfile}
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="does not match the certificate"):
        await gateway_app.serve(GatewayConfig(**wrong))
    with pytest.raises(ConfigError, match="does not match the certificate"):
        await draft_app.serve(DraftConfig(speculative_algorithm="NGRAM", listen=address, **wrong))
    with pytest.raises(ConfigError, match="does not match the certificate"):
        await target_app.serve(TargetConfig(listen=address, **wrong))
    with pytest.raises(ConfigError, match="does not match the certificate"):
        supervisor.check_flags(ServeConfig(gateway=GatewayOptions(**wrong)))
    with pytest.raises(ConfigError, match="is never encrypted"):
        await GrpcServer().start(f"unix:{folder}/x", (), server.serving())


def test_serve_passes_tls_flags_on_and_checks_health_separately(tmp_path, ours, server):
    flags = server.flags("ssl", ours.ca_certs)
    cores = CorePlan((0,), (1,), (2,))
    made = supervisor.configure(ServeConfig(gateway=GatewayOptions(**flags)), cores, tmp_path)
    child = supervisor.make_children(made, Display())[-1]
    assert all(word in child.command for word in server.argv(ours.ca_certs))
    assert child.address == f"unix:{tmp_path}/gateway.sock"
    assert supervisor.base_url(made.gateway).startswith("https://")
    assert "--ssl-certfile" not in supervisor.make_children(made, Display())[0].command
