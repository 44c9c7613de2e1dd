"""Which requests are answered at all: by the host they name, the page that sent them, and the type of their body.

A web page can make its visitor's browser send requests to this gateway. A browser does so

- with the header Origin, except with some GET requests, and with Sec-Fetch-Site, which pages cannot change: requests of
  foreign pages are refused
- without asking first (CORS) only for bodies of a few types: bodies need another one
- under a name of the page's own that it lets point here (DNS rebinding), so that the page is not foreign: names that
  such a page can have are refused
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from outrider.config import GatewayConfig
from outrider.config.access.callers import ANY

Headers = Sequence[tuple[bytes, bytes]]

_READS = ("GET", "HEAD")
# Names below these are of this machine or of a cluster; no domain can be registered there.
_PRIVATE_DOMAINS = (".localhost", ".internal", ".svc", ".cluster.local")
_TENSORS = "/update_weights_from_tensor"
_BINARY = "application/octet-stream"
_JSON = "application/json"


class Refusal(NamedTuple):
    """Status, code and message of an error."""

    status: int
    code: str
    message: str


class Access:
    """Refuses requests by their headers."""

    def __init__(self, config: GatewayConfig) -> None:
        hosts = {host.lower().rstrip(".") for host in config.allowed_hosts}
        self._any_host = ANY in hosts
        self._domains = (*_PRIVATE_DOMAINS, *(host for host in hosts if host.startswith(".")))
        self._hosts = hosts | {config.host.lower(), socket.gethostname().lower()}
        self._origins = frozenset(origin.lower() for origin in config.allowed_origins)

    def refusal(self, method: str, path: str, headers: Headers, *, local: bool) -> Refusal | None:
        """Why a request is refused; None for one that is not. local: it came over the control socket."""
        refused = None if local else self._of_host(headers) or self._of_page(method, headers)
        return refused or _of_body(method, path, headers)

    def _of_host(self, headers: Headers) -> Refusal | None:
        named = [value for name, value in headers if name == b"host"]
        if not named:  # HTTP/1.0; browsers always send one
            return None
        host = host_of(named[0].decode("latin-1"))
        if len(named) == 1 and self.allows(host):
            return None
        message = f"the host {host} is not served here; if it is a name of this gateway, start it with --allowed-hosts"
        return Refusal(403, "host_not_allowed", message)

    def allows(self, host: str) -> bool:
        """True for a name or an IP address that requests may use. host: without a port."""
        if self._any_host or "." not in host or host in self._hosts or host.endswith(self._domains):
            return True
        return _is_address(host)

    def _of_page(self, method: str, headers: Headers) -> Refusal | None:
        """A refusal for a request of a browser on behalf of a page from elsewhere."""
        found = dict(headers)
        origin = found.get(b"origin", b"").decode("latin-1").lower()
        site = found.get(b"sec-fetch-site", b"")
        if method == "OPTIONS" or ANY in self._origins or origin in self._origins:  # CORS answers OPTIONS
            return None
        if site in (b"same-origin", b"none"):  # where a proxy changes the host, only the browser knows this
            return None
        if site:
            followed_link = method in _READS and found.get(b"sec-fetch-mode") == b"navigate" and not origin
            foreign = not followed_link
        else:
            foreign = bool(origin) and urlsplit(origin).netloc != found.get(b"host", b"").decode("latin-1").lower()
        if not foreign:
            return None
        page = origin if origin else "another site"
        message = f"a page of {page} may not send requests to this gateway; start it with --allowed-origins to allow it"
        return Refusal(403, "origin_not_allowed", message)


def host_of(value: str) -> str:
    """The host in a Host header, in lower case, without its port, brackets and last dot."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0].rstrip(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _of_body(method: str, path: str, headers: Headers) -> Refusal | None:
    """A refusal for a body of another type than the route reads, or a compressed one."""
    found = dict(headers)
    empty = b"transfer-encoding" not in found and found.get(b"content-length", b"0").strip() in (b"0", b"")
    if method in _READS or empty:
        return None
    coding = found.get(b"content-encoding", b"identity").strip().lower().decode("latin-1")
    if coding not in ("identity", ""):
        return Refusal(415, "unsupported_media_type", f"bodies in {coding} are not read; send it uncompressed")
    given = found.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if given == _JSON or (given.startswith("application/") and given.endswith("+json")):
        return None
    if path == _TENSORS and given == _BINARY:
        return None
    what = f"the body as JSON, with the header `Content-Type: {_JSON}`"
    if path == _TENSORS:
        what += f", or the tensors as a safetensors file, with `Content-Type: {_BINARY}`"
    return Refusal(415, "unsupported_media_type", f"send {what}")
