"""The campaign with pools: its scenes, what it finds, and a short run with engines that take time only."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.pools import campaign as campaigns
from tests.chaos.pools.campaign import Campaign
from tests.chaos.pools.scenes import Scene, Times, scenes
from tests.chaos.pools.system import DRAFTS, REPLICAS, TARGETS, Services

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_scenes_leave_all_replicas_in_their_pools(seed, few):
    todo = scenes(seed, few=few)
    out = set()
    for scene in todo:
        assert not out & set(scene.nodes) or scene.name == "added"
        if scene.name == "drained":
            out |= set(scene.nodes)
        if scene.name == "added":
            out -= set(scene.nodes)
    assert not out
    hit = {(scene.name, node) for scene in todo for node in scene.nodes}
    assert {name for name, _ in hit} >= {"killed", "drained", "added"}
    if not few:
        for pool in (TARGETS, DRAFTS):
            assert {name for name, node in hit if node in pool} >= {"killed", "drained", "added", "partitioned"}
    assert todo == scenes(seed, few=few)
    assert {node for seed in range(8) for scene in scenes(seed) for node in scene.nodes} == set(REPLICAS)


class QuietSystem:
    """A system whose requests never end differently, unless `follow` below makes them so."""

    url = ""
    left: list[str] = []  # noqa: RUF012

    async def metric(self, _):
        return 0.0

    async def leftovers(self):
        return self.left


@pytest.mark.parametrize(
    ("spoil", "left", "words"),
    [
        (lambda _: None, [], ""),
        (lambda stream: stream.tokens.append(9), [], "request 0 differs: another text"),
        (lambda stream: stream.tokens.pop(), [], "request 0 differs: another text"),
        (lambda stream: setattr(stream, "error", "HTTP 503"), [], "request 0 differs: HTTP 503"),
        (lambda _: None, ["1 sessions of target0 are open"], "1 sessions of target0 are open"),
    ],
)
def test_the_campaign_names_what_is_wrong(monkeypatch, spoil, left, words):
    acting = []

    async def follow(_, stream, readers):
        asked = time.monotonic()
        await asyncio.sleep(0.001)
        stream.tokens += range(stream.request.tokens)
        # Those that begin before the event have a pause of 0.5 s after it; later ones wait for their first token.
        stream.times += [asked + 0.004] if acting else [asked, asked + 0.5, asked + 1.1]
        if acting and stream.request.index == 0:
            spoil(stream)

    async def act(*_):
        acting.append(time.monotonic())
        await asyncio.sleep(0.02)
        return Times(acting[0], 0.5, None)

    async def run():
        system = QuietSystem()
        system.left = left
        campaign = Campaign(system, sessions=2, tokens=5, seconds=1.0)
        await campaign.prepare()
        return await campaign.run(Scene("killed", ("target0",), act))

    monkeypatch.setattr(campaigns, "follow", follow)
    monkeypatch.setattr(campaigns, "_BEFORE_SECONDS", 0.0)
    monkeypatch.setattr(campaigns, "_SETTLE_SECONDS", 0.05)
    result = asyncio.run(run())
    row = result.row()
    assert words in row["left behind"] if words else row["left behind"] == "nothing"
    assert (result.equal < result.answers) == ("differs" in words)
    assert (row["hosts"], row["noticed after, s"], row["whole again, s"]) == ("target0", 0.5, "")
    assert row["longest pause, s"] == pytest.approx(0.6, abs=0.01)


def test_replicas_are_started_at_their_addresses():
    real = Services(["target", "--model-path", "m"], ["draft"])
    assert real.command("target1", "a:1")[1:] == ["-m", "outrider", "target", "--model-path", "m", "--listen", "a:1"]
    simulated = Services(["engines", "target", "20"], ["engines", "draft", "4"], simulated=True)
    assert simulated.command("draft0", "a:1")[1:] == ["-m", "engines", "draft", "a:1", "4"]


@pytest.mark.long
@pytest.mark.system
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK) or not shutil.which("nsenter"),
    reason="network namespaces need root, /dev/net/tun and nsenter",
)
def test_pools_change_and_break_on_hosts_of_their_own(tmp_path):
    """In a process of its own, because the campaign's process moves to another network namespace."""
    command = [sys.executable, "-m", "tests.chaos", "pools", "--tiny", "--seconds", "1", "--sessions", "4"]
    command += ["--tokens", "60", "--log", str(tmp_path / "log"), "--output", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    log = (tmp_path / "log").read_text()
    assert ended.returncode == 0, ended.stdout + ended.stderr + log
    assert "4 passed, 0 failed" in ended.stdout
    assert "Traceback" not in log
    assert not (tmp_path / "chaos-pools.md").exists()
