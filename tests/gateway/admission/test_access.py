"""Which requests are refused by their host, the page that sent them, and the type of their body."""

import pytest

from gateway.admission.access import Access
from outrider.config import GatewayConfig
from outrider.errors import ConfigError

HOST = "gpu1.example.com"
ACCESS = Access(
    GatewayConfig(
        host=HOST, allowed_hosts=("api.example.org", ".trusted.example"), allowed_origins=("https://Chat.example",)
    )
)
JSON = "application/json"


def refusal(access=ACCESS, method="GET", path="/v1/models", **headers):
    """The code of the refusal of a request with these headers."""
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    found = access.refusal(method, path, pairs, local=False)
    return found and found.code


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost:30000", True),
        ("LOCALHOST", True),
        ("127.0.0.1:30000", True),
        ("[::1]:30000", True),
        ("10.1.2.3", True),
        ("[fe80::1]", True),
        ("gateway:30000", True),  # of compose, and of a machine
        ("chat.localhost", True),
        ("outrider.models.svc.cluster.local:30000", True),
        ("outrider.models.svc", True),
        ("host.docker.internal", True),
        (HOST, True),
        (f"{HOST}.:30000", True),
        ("api.example.org", True),
        ("a.b.trusted.example", True),
        ("trusted.example", False),
        ("evil.example", False),
        ("evil.example:30000", False),
        ("127.0.0.1.evil.example", False),
        ("api.example.org.evil.example", False),
        ("localhost.evil.example", False),
    ],
)
def test_a_name_that_anybody_could_own_is_no_host(host, allowed):
    assert refusal(host=host) == (None if allowed else "host_not_allowed")
    assert refusal(Access(GatewayConfig(allowed_hosts=("*",))), host=host) is None


def test_a_request_has_one_host_or_none():
    two = [(b"host", b"localhost"), (b"host", b"evil.example")]
    for pairs in (two, two[::-1], [(b"host", b"localhost")] * 2):
        assert ACCESS.refusal("GET", "/", pairs, local=False) is not None
    assert ACCESS.refusal("GET", "/", [], local=False) is None


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),  # no browser
        ({"origin": "http://localhost:30000"}, True),  # the chat page
        ({"origin": "https://localhost:30000"}, True),  # behind a proxy that ends TLS
        ({"origin": "http://localhost:8080"}, False),
        ({"origin": "http://localhost"}, False),
        ({"origin": "https://chat.example"}, True),
        ({"origin": "https://chat.example", "sec_fetch_site": "cross-site"}, True),
        ({"origin": "https://chat.example.evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "https://evil.example", "sec_fetch_site": "cross-site"}, False),
        ({"origin": "https://api.example.org", "sec_fetch_site": "same-origin"}, True),  # the proxy changes the host
        ({"sec_fetch_site": "none"}, True),  # typed into the address bar
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_foreign_pages_send_no_requests(method, headers, allowed):
    wanted = None if allowed else "origin_not_allowed"
    assert refusal(method=method, host="localhost:30000", **headers) == wanted
    assert refusal(Access(GatewayConfig(allowed_origins=("*",))), method=method, host="localhost", **headers) is None


def test_a_link_from_elsewhere_can_be_followed():
    link = {"host": "localhost", "sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert refusal(**link) is None
    assert refusal(method="POST", **link) == "origin_not_allowed"  # a form
    assert refusal(origin="https://evil.example", **link) == "origin_not_allowed"


@pytest.mark.parametrize(
    ("path", "headers", "allowed"),
    [
        ("/v1/completions", {"content_type": JSON}, True),
        ("/v1/completions", {"content_type": "Application/JSON; charset=utf-8"}, True),
        ("/v1/completions", {"content_type": "application/problem+json"}, True),
        ("/v1/completions", {"content_type": JSON, "content_encoding": "identity"}, True),
        ("/v1/completions", {"content_type": JSON, "content_encoding": "gzip"}, False),
        ("/v1/completions", {"content_type": "text/plain"}, False),
        ("/v1/completions", {"content_type": f"text/plain; {JSON}"}, False),
        ("/v1/completions", {"content_type": "multipart/form-data"}, False),
        ("/v1/completions", {}, False),
        ("/update_weights_from_tensor", {"content_type": "application/octet-stream"}, True),
        ("/update_weights_from_tensor", {"content_type": JSON}, True),
        ("/update_weights_from_tensor", {"content_type": "text/plain"}, False),
        ("/update_weights_from_disk", {"content_type": "application/octet-stream"}, False),
    ],
)
@pytest.mark.parametrize("size", [{"content_length": "7"}, {"transfer_encoding": "chunked"}])
def test_bodies_have_the_type_of_their_route(path, headers, size, allowed):
    wanted = None if allowed else "unsupported_media_type"
    assert refusal(method="POST", path=path, **headers, **size) == wanted
    pairs = [(b"content-length", b"0")]
    assert ACCESS.refusal("POST", path, pairs, local=False) is None  # no body, no type


@pytest.mark.parametrize("flags", [
    {"allowed_hosts": ("http://x.example",)}, {"allowed_hosts": ("",)}, {"allowed_hosts": ("*.x.example",)},
    {"allowed_origins": ("x.example",)}, {"allowed_origins": ("https://x.example/page",)},
])  # fmt: skip
def test_impossible_hosts_and_origins_are_refused(flags):
    with pytest.raises(ConfigError, match=r"is no (host name|origin)"):
        GatewayConfig(**flags).check()
