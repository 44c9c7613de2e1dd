"""`bench pools`: its clients, its engines, and a run of all parts with small pools."""

import asyncio
import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.errors import BenchError
from bench.pools.engines import PoolDraft, PoolTarget, number_of, prompt_of
from bench.pools.load import Answer, Load
from bench.pools.quota import limited
from bench.pools.system import Traffic, traffic_of
from bench.streams.fakes import VOCAB
from outrider.serving.messages import OpenSession
from outrider.speculation.sampling import SamplingParams, StopConditions


def opened(number, new, feature_spec=0):
    tokens = np.array(prompt_of(number), np.uint32)
    return OpenSession(1, tokens, 2, SamplingParams(0.0), StopConditions(max_tokens=new), feature_spec=feature_spec)


def test_a_target_commits_what_has_arrived_and_never_waits(capsys):
    target, draft = PoolTarget(0.0, accept_length=4, row_bytes=8), PoolDraft(0.0, accept_length=4)
    for engine in (target, draft):
        engine.open(opened(VOCAB + 100, 12, feature_spec=5))
    assert not target.idle
    first = target.step()  # without a proposal: the bonus token alone
    late = draft.step().proposals  # anchored before that token
    assert [commit.tokens.tolist() for commit in first.commits] == [[101]]
    target.receive(late, [])
    second = target.step()
    assert second.commits[0].tokens.tolist() == [102, 103, 104, 105]
    assert (second.commits[0].verified, second.commits[0].accepted) == (7, 3)
    (block,) = second.features  # the prompt's states and the first token's were sent before
    assert (block.first, block.rows.shape, block.spec_id) == (2, (4, 8), 5)
    draft.receive([], [*first.commits, *second.commits])
    target.receive(draft.step().proposals, [])
    third = target.step()
    last = target.step()  # no more than was asked for
    assert [one.commits[0].tokens.tolist() for one in (third, last)] == [[106, 107, 108, 109], [110, 111, 112]]
    assert (last.commits[0].finish_reason.name, target.idle) == ("LENGTH", True)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [str(VOCAB + 100)] * 2


def test_foreign_draft_tokens_are_dropped():
    target, draft = PoolTarget(0.0, 4), PoolDraft(0.0, 4)
    target.open(opened(100, 12))
    draft.open(opened(200, 12))
    target.receive(draft.step().proposals, [])
    assert target.step().commits[0].tokens.tolist() == [101]


def test_prompts_have_numbers():
    assert [number_of(prompt_of(n)) for n in (0, 1, VOCAB - 1, VOCAB, 77 * VOCAB + 5)] == [
        0, 1, VOCAB - 1, VOCAB, 77 * VOCAB + 5,
    ]  # fmt: skip


async def served(texts, sessions=1, tokens=4):
    """A load of a server that sends these pieces, with the load's answers."""

    async def answer(reader, writer):
        await reader.readuntil(b"}")
        for piece in texts:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        load = Load([server.sockets[0].getsockname()[1]], sessions, tokens, first=10)
        async with load.running():
            await asyncio.sleep(0.05)
    return load


def test_clients_count_tokens_that_are_divided_between_pieces():
    load = asyncio.run(served([b'{"text":" w11 w12 ', b'w13"}{"text":" ', b'w14"}'], tokens=4))
    (answer, *_) = load.all_answers
    assert (sum(answer.counts), answer.prompt) == (4, 10)
    assert load.arrival(10, 0.0) == answer.times[0]
    assert load.arrival(10, answer.times[-1] + 1) is load.arrival(9, 0.0) is None


@pytest.mark.parametrize("text", [b" w11 w12 w13", b" w11 w12 w14 w15", b" w11 w12 w13 w14 w15", b"no tokens"])
def test_a_text_that_differs_ends_the_load(text):
    with pytest.raises(BenchError, match="an answer of 4 tokens differs"):
        asyncio.run(served([text]))


def test_a_load_has_begun_once_each_client_has_a_token():
    async def begin():
        load = Load([1], 2, 4)
        load.answers = [[Answer(0, 4, asked=1.0, times=[1.5])], [Answer(1, 4, asked=1.0)]]
        waiting = asyncio.create_task(load.begun())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        load.answers[1][0].times.append(3.0)
        return await waiting

    assert asyncio.run(begin()) == 2.0


def test_pauses_and_waits_include_what_lasts():
    answer = Answer(0, tokens=6, asked=1.0, times=[3.0, 3.5, 4.0], counts=[1, 2, 1])
    assert (answer.wait(0.0, 4.5), answer.wait(3.1, 4.5), answer.wait(0.0, 0.9)) == (2.0, 0.0, 0.0)
    assert Answer(0, tokens=6, asked=1.0).wait(0.0, 4.5) == 3.5
    assert Answer(0, tokens=6, asked=1.0).pause(0.0, 4.5) == 0.0
    assert answer.pause(0.0, 4.5) == 0.5
    assert answer.pause(3.1, 4.2) == 0.5
    assert answer.pause(3.1, 9.0) == 5.0
    answer.counts[2] = 3
    assert answer.pause(3.1, 9.0) == 0.5
    assert (answer.within(3.0, 4.0), answer.within(3.1, 9.0)) == (3, 5)


def test_traffic_is_read_from_metrics():
    page = (
        'outrider_stream_frames_total{stream="target",direction="sent",transport="grpc"} 4.0\n'
        'outrider_stream_frames_total{stream="target",direction="sent",transport="socket"} 3.0\n'
        'outrider_stream_bytes_total{stream="features",direction="received",transport="grpc"} 1e+06\n'
        "# HELP outrider_verification_steps_total Commits\noutrider_verification_steps_total 21.0\n"
    )
    found = traffic_of(page).plus(traffic_of(page)).since(Traffic({("target", "sent"): 4.0}, commits=2.0))
    assert (found.frames["target", "sent"], found.bytes_of("features", "received")) == (10, 2_000_000)
    assert (found.commits, found.bytes_of("draft", "sent")) == (40.0, 0.0)
    assert found.scaled(0.5) == Traffic({("target", "sent"): 5.0}, {("features", "received"): 1e6}, 20.0)


def test_without_a_share_nothing_is_limited():
    with limited(0.0) as limit:
        limit(1)


def test_a_plan_needs_figures(report_folder):
    with pytest.raises(BenchError, match="run `outrider bench pools` first"):
        main(["pools", "--reckon"])
    (report_folder / "pools.json").write_text('{"rows": [], "more": {}}')
    with pytest.raises(BenchError, match="lacks the parts throughput and features"):
        main(["pools", "--reckon"])


@pytest.mark.long
@pytest.mark.system
def test_small_pools_and_what_is_reckoned_from_them(report_folder):
    steps = ["--step-ms", "30"]  # so that proposals arrive in time beside other tests
    assert main(["pools", "--tiny", *steps, "--parts", "throughput", "features", "changes"]) == 0
    page = json.loads((report_folder / "pools.json").read_text())
    (row,) = page["rows"]
    assert (row["targets"], row["drafts"], row["sessions"]) == (2, 2, 8)
    assert row["accept length"] > 1.2
    assert row["gateway cores"] > 0
    (states,) = page["more"]["Hidden states that a gateway relays"]
    assert states["feature bytes/s"] == pytest.approx(64 * states["tokens/s"], rel=0.3)
    seen = {row["change"]: row for row in page["more"]["Replicas that join and leave"]}
    assert len(seen) == 8
    assert all(seen[name]["first token after, ms"] > 0 for name in ("target added", "draft added"))
    reckoned = json.loads((report_folder / "pools-reckoned.json").read_text())
    assert any(row["targets"] == 100 for row in reckoned["rows"])
    (report_folder / "pools-reckoned.json").unlink()
    assert main(["pools", "--reckon"]) == 0
    assert json.loads((report_folder / "pools-reckoned.json").read_text())["rows"] == reckoned["rows"]
