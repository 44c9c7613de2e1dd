"""Admission: API keys, origins, and request limits."""

import stat
import threading
from functools import partial

import httpx
import openai
import pytest

from gateway.admission.admission import Keys
from gateway.admission.caller import Caller, client_network, peer_network
from outrider.client import Client
from outrider.config import GatewayConfig
from outrider.errors import ConfigError, Unauthenticated
from tests.support.gateway.admission import LONG, A, gateway_with, slow
from tests.support.gateway.engines import expected
from tests.support.gateway.services import Gateway, answers, until

KEY = {"authorization": "Bearer alpha"}


CONTROL = (
    ("POST", "/pause_generation"),
    ("POST", "/continue_generation"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/update_weights_from_disk"),
    ("POST", "/update_weights_from_tensor"),
    ("POST", "/update_weights_from_distributed"),
    ("POST", "/init_weights_update_group"),
    ("POST", "/destroy_weights_update_group"),
    ("POST", "/update_weight_version"),
    ("POST", "/release_memory_occupation"),
    ("POST", "/resume_memory_occupation"),
    ("POST", "/abort_request"),
)


@pytest.fixture(scope="module")
def guarded(folder, target, draft):
    (folder / "keys").write_text("beta\n")
    flags = {
        "api_key": "alpha",
        "api_key_file": folder / "keys",
        "admin_api_key": "superior",
        "control_socket": folder / "control.sock",
        "max_requests_per_key": 1,
        "max_pending_requests": 2,
    }
    with gateway_with(folder, target, draft, **flags, allowed_origins=["https://page.example"]) as process:
        yield process


@pytest.fixture(scope="module")
def gateway_without_admin(folder, target, draft):
    with gateway_with(folder, target, draft, admin_key="") as process:
        yield process


# --- keys ---


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer gamma"}, {"authorization": "alpha"}])
@pytest.mark.parametrize("path", ["/v1/models", "/tokenizer_info", "/openapi.json", "/get_server_info", "/nowhere"])
def test_routes_require_a_key(guarded, path, headers):
    response = guarded.client.get(path, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/health_generate", "/metrics"])
def test_health_and_metrics_require_no_key(guarded, path):
    assert guarded.client.get(path).status_code == 200


def test_each_key_opens_its_routes(guarded):
    for key in ("alpha", "beta", "superior"):
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            answer = client.completions.create(model="default", prompt="A", max_tokens=1, temperature=0)
        assert answer.choices[0].text == "B"
    unknown = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x", max_retries=0)
    with unknown as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    root = {"authorization": "Bearer superior"}
    abort_all = partial(guarded.client.post, "/abort_request", json={"abort_all": True})
    assert abort_all(headers=KEY).status_code == 401  # the administrator has another key
    assert abort_all(headers=root).status_code == 200
    assert guarded.client.post("/abort_request", json={"rid": "a"}, headers=KEY).status_code == 200
    info = guarded.client.get("/get_server_info", headers=KEY).text
    assert "alpha" not in info
    assert "superior" not in info


def test_the_administrator_key_is_sent_like_other_keys(folder, target, draft):
    with gateway_with(folder, target, draft, admin_api_key="chef") as gateway:
        post = partial(gateway.client.post, "/abort_request", json={"abort_all": True})
        for given in ({}, {"authorization": "Bearer koch"}, {"authorization": "chef"}):
            refused = post(headers=given)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
            assert "admin" in refused.json()["error"]["message"]
        for given in ("Bearer chef", "bearer  chef"):
            assert post(headers={"authorization": given}).status_code == 200


@pytest.fixture(scope="module")
def over_socket(guarded, folder):
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(folder / "control.sock")), base_url="http://x.com"
    ) as client:
        yield client


def controls(client, method, path, **headers):
    """The status of a call of a control route, which changes nothing."""
    kind = "octet-stream" if "tensor" in path else "json"
    body = b"" if method == "GET" or "tensor" in path else b'{"abort_all": true, "model_path": "/nowhere"}'
    return client.request(method, path, content=body, headers={"content-type": f"application/{kind}"} | headers)


@pytest.mark.parametrize(("method", "path"), CONTROL)
def test_control_routes_are_closed_to_clients(guarded, method, path):
    for given in ({}, KEY, {"authorization": "Bearer no"}, {"authorization": "Bearer alpha superior"}):
        answer = controls(guarded.client, method, path, **given)
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_without_an_administrators_key_control_routes_are_closed_to_all(gateway_without_admin, target):
    for method, path in CONTROL:
        for given in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer None"}):
            answer = controls(gateway_without_admin.client, method, path, **given)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
            assert "--admin-api-key-file" in answer.json()["error"]["message"]
    assert not target.engine.held
    assert gateway_without_admin.text("A", max_tokens=2) == "BC"


def test_all_routes_are_open_over_the_control_socket(over_socket, guarded, folder, target):
    assert stat.S_IMODE((folder / "control.sock").stat().st_mode) == 0o600
    assert controls(over_socket, "POST", "/pause_generation").status_code == 200
    try:
        assert target.engine.held
    finally:
        assert controls(over_socket, "POST", "/continue_generation").status_code == 200
    assert over_socket.post("/abort_request", json={"abort_all": True}).status_code == 200
    assert over_socket.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}).status_code == 200
    # A type is required there, too.
    assert over_socket.post("/abort_request", content=b"{}").status_code == 415


def test_a_request_is_aborted_by_its_own_key_or_an_administrators(guarded, over_socket, target):
    def abort(headers=None, client=guarded.client):
        return client.post("/abort_request", json={"rid": "mine"}, headers=headers).json()["aborted_requests"]

    for own in (KEY, {"authorization": "Bearer superior"}, None):
        answers = []
        until(lambda: target.sessions == 0)  # the session before has left the target, too
        with slow(target, 0.03):
            body = {**LONG, "rid": "mine"}
            ask = partial(guarded.client.post, "/v1/completions", json=body, headers=KEY)
            thread = threading.Thread(target=lambda: answers.append(ask()))  # noqa: B023
            thread.start()
            until(lambda: target.sessions == 1)
            assert abort({"authorization": "Bearer beta"}) == 0
            assert (abort(own) if own else abort(client=over_socket)) == 1
            thread.join(60)
        assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


def test_keys_share_no_caches(guarded, target, draft):
    """Cached pages and n-grams are found by the salt that both services get."""

    def salt(key, **options):
        body = {"prompt": "a" * 40, "max_tokens": 1, "temperature": 0, **options}
        answer = guarded.client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return target.engine.seen[-1].cache_salt, cached > 0

    first, again, other = salt("alpha"), salt("alpha"), salt("beta")
    own, others = salt("alpha", cache_salt="x"), salt("beta", cache_salt="x")
    assert [cached for _, cached in (first, again, other, own, others)] == [False, True, False, False, False]
    assert first[0] == again[0]
    assert len({first[0], other[0], own[0], others[0]}) == 4
    until(lambda: draft.engine.seen[-1].cache_salt == others[0])
    with Client(f"127.0.0.1:{guarded.grpc_port}", api_key="alpha") as client:
        client.complete(A, max_tokens=1, temperature=0)
        assert target.engine.seen[-1].cache_salt == first[0]
    assert "alpha" not in first[0]
    native = {"text": "A", "sampling_params": {"max_new_tokens": 1}, "cache_salt": "x"}
    guarded.client.post("/generate", json=native, headers=KEY)
    assert target.engine.seen[-1].cache_salt == own[0]


def test_services_know_callers_by_key_or_by_network(guarded, gateway_without_admin, target):
    def caller(gateway, key=None):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        body = {"prompt": "A", "max_tokens": 1, "temperature": 0}
        assert gateway.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        rest = target.engine.seen[-1].caller
        with Client(f"127.0.0.1:{gateway.grpc_port}", api_key=key) as client:
            client.complete(A, max_tokens=1, temperature=0)
        assert target.engine.seen[-1].caller == rest
        return rest

    assert caller(gateway_without_admin) == "127.0.0.1"
    assert len({caller(guarded, "alpha"), caller(guarded, "beta"), "", "127.0.0.1"}) == 4


@pytest.mark.parametrize(
    ("peer", "client", "network"),
    [
        ("ipv4:10.1.2.3:4567", ("10.1.2.3", 4567), "10.1.2.3"),
        ("ipv6:%5B2001:db8:1:2:3:4:5:6%5D:4567", ("2001:db8:1:2:3:4:5:6", 4567), "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:10.1.2.3]:4567", ("::ffff:10.1.2.3", 4567), "10.1.2.3"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4567", ("fe80::1%eth0", 4567), "fe80::/64"),
        ("unix:/run/outrider/socket", None, ""),
    ],
)
def test_networks_of_callers(peer, client, network):
    assert (peer_network(peer), client_network(client)) == (network, network)


def test_caches_can_be_shared_by_all_keys(tmp_path):
    (tmp_path / "keys").write_text("one two")
    for scope, names in (("key", 2), ("all", 1)):
        keys = Keys(GatewayConfig(api_key_file=str(tmp_path / "keys"), cache_scope=scope))
        callers = [keys.check(f"Bearer {key}".encode()) for key in ("one", "two")]
        assert len({caller.caches for caller in callers}) == names
        assert len({caller.name for caller in callers}) == 2
    assert Keys(GatewayConfig()).check(b"Bearer one") == Caller()


@pytest.mark.parametrize(("network", "trusted"), [
    ("10.1.2.3", True), ("10.2.0.1", False), ("", False), ("fd00:1::/64", True), ("fd00:2::/64", False), ("x", False),
])  # fmt: skip
def test_connections_of_some_networks_are_administrators(network, trusted):
    keys = Keys(GatewayConfig(api_key=("alpha",), admin_networks=("10.1.0.0/16", "fd00:1::/32")))
    if trusted:
        keys.check_admin(keys.check(b"", network=network))
    else:
        with pytest.raises(Unauthenticated):
            keys.check(b"", network=network)
    with pytest.raises(ConfigError, match="is no network"):
        GatewayConfig(admin_networks=("10.1.0.1/16",)).check()


def test_grpc_requires_a_key(guarded):
    address = f"127.0.0.1:{guarded.grpc_port}"
    with Client(address, api_key="beta") as client:
        assert client.info().served_model_name == "counting"
        assert client.complete(A, max_tokens=3, temperature=0).token_ids == expected(A, 3)
    for key in (None, "gamma"):
        with Client(address, api_key=key) as client:
            with pytest.raises(Unauthenticated):
                client.info()
            with pytest.raises(Unauthenticated):
                client.complete(A, max_tokens=1)


def test_keys_can_come_from_the_environment(folder, target, draft, monkeypatch):
    monkeypatch.setenv("OUTRIDER_API_KEY", "one two")
    with gateway_with(folder, target, draft) as gateway:
        assert gateway.client.get("/v1/models").status_code == 401
        for key in ("one", "two"):
            assert gateway.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200


# --- browsers ---


def test_a_foreign_page_cannot_pause_the_server(guarded, target):
    """As sent by a browser without asking first; and by a page whose own name points here."""
    root = {"authorization": "Bearer superior"}
    for headers in (
        {"origin": "https://evil.example", "content-type": "application/json"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"host": f"evil.example:{guarded.port}", "origin": f"http://evil.example:{guarded.port}"},
    ):
        for path in ("/pause_generation", "/v1/completions", "/health"):
            refused = guarded.client.post(path, content=b"{}", headers=headers | root)
            assert refused.status_code == 403, (path, headers)
            assert refused.json()["error"]["code"] in ("origin_not_allowed", "host_not_allowed")
            assert refused.headers["x-request-id"]
    for kind in ({"content-type": "text/plain"}, {"content-encoding": "gzip", "content-type": "application/json"}):
        refused = guarded.client.post("/pause_generation", content=b"{}", headers=kind | root)
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert not target.engine.held


def test_only_allowed_origins_get_cors_headers(guarded, gateway_without_admin):
    ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}

    def preflight(process, origin):
        headers = {"origin": origin, **ask}
        return process.client.options("/v1/chat/completions", headers=headers)

    allowed = preflight(guarded, "https://page.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in preflight(guarded, "https://other.example").headers
    assert "access-control-allow-origin" not in preflight(gateway_without_admin, "https://page.example").headers
    answer = guarded.client.get("/v1/models", headers={"origin": "https://page.example", **KEY})
    assert answer.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", b" " * (5 << 20)), ("/v1/models", b"")])
def test_refusals_have_cors_headers(guarded, path, body):
    """Refusals of the middleware as well, because browsers hide answers without these headers."""
    refused = guarded.client.request("POST", path, content=body, headers={"origin": "https://page.example"})
    assert refused.status_code == (413 if body else 401)
    assert refused.headers["access-control-allow-origin"] == "https://page.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()
    assert refused.headers["x-request-id"]


def test_the_starting_gateway_answers_with_cors_headers(folder):
    gateway = Gateway(folder, [f"unix:{folder}/absent"], allowed_origins=["https://page.example"])
    origin = {"origin": "https://page.example"}
    try:
        until(lambda: answers(gateway, "/health/live") == 200, seconds=60)
        refused = gateway.client.get("/v1/models", headers=origin)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (503, "https://page.example")
        assert gateway.client.options(
            "/v1/models", headers={**origin, "access-control-request-method": "GET"}
        ).is_success
    finally:
        assert gateway.stop() == 0


# --- how many at a time ---


def test_running_requests_of_a_key_are_limited(guarded, target):
    with (
        slow(target, 0.03),
        httpx.stream(
            "POST", f"{guarded.url}/v1/completions", json={**LONG, "stream": True}, headers=KEY, timeout=30
        ) as stream,
    ):
        until(lambda: target.sessions == 1)
        response = guarded.client.post("/v1/completions", json={"prompt": "A"}, headers=KEY)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) >= 1
        other = {"authorization": "Bearer beta"}
        assert guarded.client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers=other).is_success
        # At most two generations run together, over all keys.
        response = guarded.client.post("/v1/completions", json={"prompt": "A", "n": 2}, headers=other)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
        assert response.headers["retry-after"]
        stream.close()
    until(lambda: target.sessions == 0)
    until(lambda: guarded.client.post("/v1/completions", json={"prompt": "A"}, headers=KEY).status_code == 200)
