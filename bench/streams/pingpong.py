"""The floor: bare frames between two processes over a Unix domain socket, there and back, nothing else.

As a module it is the echoing process: `python -m bench.streams.pingpong PATH`.
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

_PATIENCE = 20.0  # seconds that the other process gets to start


def _read(pipe: FrameSocket) -> bytes:
    """The next frame; the other side sends one at a time. Raises EOFError at the end."""
    come = select.poll()
    come.register(pipe.file, select.POLLIN)
    while True:
        come.poll()
        for frame in pipe.receive():
            return frame


def _write(pipe: FrameSocket, frame: bytes) -> None:
    pipe.send(frame)
    room = select.poll()
    room.register(pipe.file, select.POLLOUT)
    while pipe.unsent:
        room.poll()
        pipe.flush()


def serve(path: str) -> None:
    """Echo the frames of one connection, until it ends."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        pipe = FrameSocket(listening.accept()[0])
    with contextlib.closing(pipe), contextlib.suppress(EOFError):
        while True:
            _write(pipe, _read(pipe))


def _connect(path: str) -> FrameSocket:
    until = time.monotonic() + _PATIENCE
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return FrameSocket(connection)


def _measure(path: str, sizes: list[int], rounds: int) -> list[float]:
    medians = []
    pipe = _connect(path)
    for size in sizes:
        frame, times = b"x" * size, []
        for _ in range(rounds):
            start = time.perf_counter()
            _write(pipe, frame)
            _read(pipe)
            times.append(time.perf_counter() - start)
        medians.append(1e6 * statistics.median(times[rounds // 10 :]))
    pipe.close()
    return medians


def round_trips(path: str, sizes: list[int], rounds: int = 1000) -> list[float]:
    """Median round trip in microseconds for frames of given sizes in bytes."""
    process = start([sys.executable, "-m", "bench.streams.pingpong", path])
    try:
        return _measure(path, sizes, rounds)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(sys.argv[1])
