"""Paired rounds of two systems, and their figures."""

import pytest

from bench.harness.prompts import Prompt
from bench.serve.client import Target
from bench.serve.outcome import Outcome
from bench.speculation.paired_rounds import Cell, Pair, measured_row, run_pairs
from tests.support.bench.server import TOKENS, running


async def test_systems_alternate():
    parts = [[Prompt("x", ("one two",)), Prompt("x", ("three",))]] * 3
    async with running() as (fast, url), running() as (slow, other):
        target, plain = (Target(address, body={"max_tokens": 9}) for address in (url, other))
        pairs = await run_pairs(target, plain, parts, Cell(0.5, 2))
        assert (fast.flushed, slow.flushed) == (1, 1)
        assert fast.most == slow.most == 2
        bodies = fast.requests[4:]
        assert [body["seed"] for body in bodies] == [0, 1, 1000, 1001, 2000, 2001]
        assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.5, 9)}
        assert slow.requests[4:] == bodies
        with pytest.raises(RuntimeError, match="HTTP 500"):
            await run_pairs(target, plain, [[Prompt("x", ("500",))]], Cell(0.0, 1))
    facts = measured_row(pairs)
    assert len(facts["rounds"]) == 3
    assert facts["low"] < facts["ratio"] < facts["high"]
    assert (facts["accept_length"], facts["acceptance_rate"], facts["same_text"]) == (2.0, pytest.approx(1 / 3), "6/6")
    assert sum(o.output_tokens for pair in pairs for o in pair.plain) == 6 * TOKENS


def test_figures_of_rounds():
    def answered(begin, end, text="a", accepted=0, drafted=0):
        return Outcome("x", due=begin, ended=end, texts=[text], output_tokens=12, counted=True, accepted=accepted,
                       drafted=drafted)  # fmt: skip

    first = Pair([answered(0, 2, accepted=6, drafted=9), answered(0, 4)], [answered(0, 6), answered(0, 6)])
    second = Pair([answered(5, 7), answered(6, 9, "b", drafted=3)], [answered(1, 5), answered(5, 9)])
    facts = measured_row([first, second])
    assert facts["rounds"] == [1.5, 2.0]
    assert facts["ratio"] == pytest.approx(3**0.5)
    assert (facts["tokens_per_s"], facts["plain_tokens_per_s"], facts["round_s"]) == (48 / 8, 48 / 14, 4.0)
    assert (facts["accept_length"], facts["acceptance_rate"], facts["same_text"]) == (48 / 42, 0.5, "3/4")
