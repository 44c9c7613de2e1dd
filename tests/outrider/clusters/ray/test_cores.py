"""Cores that actors of one machine take, and REST over a Unix domain socket."""

import http.server
import json
import os
import socketserver
import threading

import pytest

from outrider.clusters.ray import local_rest
from outrider.clusters.ray.cores import CoreLocks
from outrider.errors import ConfigError


def test_no_core_is_taken_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    first, second, third = (CoreLocks(tmp_path / "cores") for _ in range(3))
    assert first.take(2) == [0, 1]
    assert second.take(3) == []  # too few are left, and none of them is held
    assert second.take(2) == [2, 3]
    assert third.take(1) == []
    first.release()
    assert third.take(1) == [0]


def test_the_folder_must_be_ones_own(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="belongs to another user"):
        CoreLocks(tmp_path / "link").take(1)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps([self.path, self.headers["Content-Type"], body]).encode()
        self.send_response(202)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def address_string(self):
        return "socket"

    def log_message(self, *_):
        pass


def test_rest_over_a_socket(tmp_path):
    path = str(tmp_path / "control.sock")
    with socketserver.ThreadingUnixStreamServer(path, Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        status, answer = local_rest.ask(path, "POST", "/workers", {"url": "a:1"})
        server.shutdown()
        thread.join()
    assert (status, json.loads(answer)) == (202, ["/workers", "application/json", {"url": "a:1"}])
    with pytest.raises(OSError, match="refused"):
        local_rest.ask(path, "GET", "/workers")
