"""Ends answers over HTTP whose clients do not read: each holds memory, and the session of its stream.

A connection is slow while the gateway has bytes for it that its kernel does not take. Progress is what the peer's
kernel acknowledges, so a client that reads now and then, in large pieces, is not slow.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

log = logging.getLogger(__name__)

_LOOKS = 6  # at each connection, in the time that it may be slow
_LEAST_BYTES = 4096  # that a client reads in this time
_ACKNOWLEDGED = struct.Struct("=120xQ")  # `tcpi_bytes_acked` of the kernel's struct tcp_info


class _Slow(NamedTuple):
    """Since when a connection has been slow, and what its peer had acknowledged then."""

    since: float
    acknowledged: int


async def end_slow_readers(connections: Iterable[Any], seconds: float) -> None:
    """Watch connections until cancelled, and cut those that stay slow. connections: BoundedHttp, which change.

    seconds: that a connection may be slow; 0 watches nothing
    """
    clock = asyncio.get_running_loop().time
    slow: dict[Any, _Slow] = {}
    while seconds > 0.0:
        await asyncio.sleep(seconds / _LOOKS)
        before, slow, now = slow, {}, clock()
        for connection in list(connections):
            transport = connection.transport
            waiting = transport.get_write_buffer_size()
            if not waiting or transport.is_closing():
                continue
            acknowledged = _acknowledged(transport)
            known = before.get(connection)
            if known is None or acknowledged - known.acknowledged >= _LEAST_BYTES:
                slow[connection] = _Slow(now, acknowledged)
            elif now - known.since < seconds:
                slow[connection] = known
            else:
                log.warning(
                    "an answer to %s is cut: its client has not read for %.0f s while %d bytes waited",
                    connection.client, now - known.since, waiting,
                )  # fmt: skip
                connection.cut()


def _acknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the peer's kernel has acknowledged. For a Unix socket, a number that grows as it takes bytes."""
    connection = transport.get_extra_info("socket")
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.size)
        return int(_ACKNOWLEDGED.unpack(info)[0])
    except (OSError, AttributeError, struct.error):
        return -transport.get_write_buffer_size()
