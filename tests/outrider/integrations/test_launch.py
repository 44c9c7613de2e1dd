"""A gateway as a child of a trainer."""

import asyncio
import shlex
import sys

import pytest

from outrider.integrations.launch import LaunchedGateway, flags_of
from outrider.integrations.rollouts import RolloutError, RolloutGateway

_GATEWAY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        given = self.headers["Authorization"] == "Bearer " + os.environ["OUTRIDER_ADMIN_API_KEY"]
        self.send_response(200 if given else 401)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'{"pid": %d, "devices": "%s"}' % (os.getpid(), os.environ["DEVICES"].encode()))
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def launched(program, **flags):
    return LaunchedGateway(shlex.join([sys.executable, "-c", program]), "127.0.0.1", flags)


def test_settings_become_flags():
    given = {"tp_size": 2, "online": True, "dtype": None, "page": False, "target": ["a:1", "b:2"], "port": 0}
    assert flags_of(given) == ["--tp-size", "2", "--online", "--target", "a:1", "b:2", "--port", "0"]


def test_a_gateway_is_used_once_it_is_healthy_and_ends_with_its_trainer():
    async def use():
        child = launched("print('-' * 500_000)" + _GATEWAY)  # a line beyond any limit must not stop it
        await child.start(30, {"DEVICES": "2,3"})
        async with RolloutGateway(child.url, child.key) as gateway:
            assert (await gateway.get("/server_info"))["devices"] == "2,3"
            await child.stop()
            with pytest.raises(RolloutError, match=r"127\.0\.0\.1"):
                await gateway.get("/server_info")

    asyncio.run(use())


@pytest.mark.parametrize(
    ("program", "seconds", "error"),
    [
        ("print('no such model'); raise SystemExit(2)", 30, r"--tp-size 2.* ended with code 2; .*\nno such model"),
        ("import time; time.sleep(60)", 0.6, r"was not healthy after 1 s"),
    ],
)
def test_a_gateway_that_does_not_start_leaves_its_output_in_the_error(program, seconds, error):
    with pytest.raises(RolloutError, match=error):
        asyncio.run(launched(program, tp_size=2).start(seconds, {}))
