"""Figures from replies of peers."""

import pytest

from bench.peers.base import PeerInfo, Reply
from bench.peers.figures import equal_texts, median_and_quartiles, ratios


def test_rates_exclude_the_first_token():
    assert Reply("", 11, 1.0, 2.0).rate == pytest.approx(10.0)
    ours = [Reply("a", 11, 1.0, 2.0), Reply("b", 1, 1.0, 1.0), Reply("c", 5, 0.0, 1.0)]
    theirs = [Reply("a", 11, 0.0, 2.0), Reply("b", 9, 0.0, 1.0), Reply("c", 5, 0.0, 0.5)]
    assert ratios(ours, theirs) == pytest.approx([2.0, 0.5])
    assert median_and_quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert median_and_quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (3.0, 2.0, 4.0)


def test_texts_are_compared_within_family_and_format():
    peers = [PeerInfo("a", "x", "bf16"), PeerInfo("b", "x", "bf16", "n-gram"), PeerInfo("c", "x", "int8", "n-gram")]
    replies = {
        name: [Reply(text, 2, 0, 1) for text in texts] for name, texts in zip("abc", ("pq", "pr", "pq"), strict=True)
    }
    assert equal_texts(peers, replies) == {"b": "1/2"}
