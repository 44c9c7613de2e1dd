"""Peers that are servers."""

from bench.peers.base import PeerInfo
from bench.peers.servers import Server
from tests.support.bench.server import STEP, in_a_thread


def test_tokens_without_text_count_in_times(tmp_path):
    with in_a_thread() as url:
        server = Server(PeerInfo("a", "x", "bf16"), [], tmp_path)
        server.url = url
        _, replies = server.generate(["good", "tail"], 9)
    good, tail = replies
    assert tail.seconds - tail.first >= good.seconds - good.first + STEP
    assert tail.rate < good.rate
