"""Small real processes to supervise, and a supervisor of them, which tests kill."""

import asyncio
import contextlib
import os
import socket
import sys
import time

from outrider.process.backoff import Backoff
from outrider.supervisor.processes import Child, stop_and_kill_events, supervise

# Answers /health/ready with 200; ends at SIGTERM with code 0.
HEALTHY = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health/ready" else 404)
        self.end_headers()
    def log_message(self, *arguments):
        pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("up", os.getpid(), flush=True)
server.serve_forever()
"""
# Ignores SIGTERM.
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + HEALTHY.replace(
    "signal.signal(signal.SIGTERM, lambda *_: os._exit(0))", ""
)
QUICK = Backoff(first=0.05, longest=0.2, reset_after=30.0)


def free_port(count=1):
    """The first of `count` consecutive free ports."""
    while True:
        with contextlib.ExitStack() as probes:
            first = 0
            try:
                for number in range(count):
                    probe = probes.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", first + number if number else 0))
                    first = first or probe.getsockname()[1]
            except (OSError, OverflowError):  # one of them is taken, or there is none
                continue
            return first


def child(script, *, name="child", backoff=QUICK, on_line=lambda line: None):
    port = free_port()
    return Child(name, [sys.executable, "-Sc", script, str(port)], f"http://127.0.0.1:{port}", on_line, backoff)


async def run(children, stop=None, starting=None):
    """Supervise; until `stop`, forever by default."""
    if starting is None:
        starting = wait_ready(children)
    return await supervise(children, starting, stop or asyncio.Event(), asyncio.Event())


async def wait_ready(children):
    await asyncio.gather(*(child.wait_ready() for child in children))


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] == "Z"


def wait_gone(pids, seconds=5):
    deadline = time.monotonic() + seconds
    while not all(map(gone, pids)):
        assert time.monotonic() < deadline, "a child outlived its supervisor"
        time.sleep(0.01)


async def main():
    """A supervisor of two healthy children that shows their ids, for tests that kill it."""
    stop, hurry = stop_and_kill_events()
    children = [
        child(globals()[kind], name=kind, on_line=lambda line: print(line, flush=True)) for kind in sys.argv[1:]
    ]
    await supervise(children, wait_ready(children), stop, hurry)
    print("over", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
