"""The floor: round trips of bare frames between two processes over a Unix domain socket.

The echoing process is `python -m bench.streams.pingpong PATH`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import statistics
import sys
import time

from bench.harness.processes import start
from outrider.transport.frame_socket import FrameSocket

_STARTUP_TIMEOUT = 20.0  # seconds


def _read(connection: FrameSocket) -> bytes:
    """The next frame; the peer sends one at a time. Raises EOFError at the end of the stream."""
    readable = select.poll()
    readable.register(connection.file, select.POLLIN)
    while True:
        readable.poll()
        for frame in connection.receive():
            return frame


def _write(connection: FrameSocket, frame: bytes) -> None:
    connection.send(frame)
    writable = select.poll()
    writable.register(connection.file, select.POLLOUT)
    while connection.unsent:
        writable.poll()
        connection.flush()


def serve(path: str) -> None:
    """Echo the frames of one connection until it ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        connection = FrameSocket(listener.accept()[0])
    with contextlib.closing(connection), contextlib.suppress(EOFError):
        while True:
            _write(connection, _read(connection))


def _connect(path: str) -> FrameSocket:
    deadline = time.monotonic() + _STARTUP_TIMEOUT
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return FrameSocket(connection)


def measure_frames(path: str, sizes: list[int], rounds: int) -> list[float]:
    """Median round trips in microseconds of frames of given sizes, with the echoing process at `path`."""
    medians = []
    connection = _connect(path)
    for size in sizes:
        frame, times = b"x" * size, []
        for _ in range(rounds):
            began = time.perf_counter()
            _write(connection, frame)
            _read(connection)
            times.append(time.perf_counter() - began)
        medians.append(1e6 * statistics.median(times[rounds // 10 :]))
    connection.close()
    return medians


def round_trips(path: str, sizes: list[int], rounds: int = 1000) -> list[float]:
    """Start the echoing process. Returns median round trips in microseconds of frames of given sizes in bytes."""
    process = start([sys.executable, "-m", "bench.streams.pingpong", path])
    try:
        return measure_frames(path, sizes, rounds)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(sys.argv[1])
