"""REST over a gateway's control socket, from the same machine. It is open to the gateway's own user without a key."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

_SECONDS = 10.0


class _SocketConnection(http.client.HTTPConnection):
    """An HTTP connection over a Unix domain socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


def ask(path: str, method: str, route: str, body: Any = None) -> tuple[int, str]:
    """Status and body of an answer. path: of the socket. body: sent as JSON. Raises OSError if nothing answers."""
    connection = _SocketConnection(path)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, route, content, {"Content-Type": "application/json"} if content else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except http.client.HTTPException as error:
        raise OSError(f"the gateway's answer cannot be read: {error!r}") from None
    finally:
        connection.close()
