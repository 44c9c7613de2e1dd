"""Starting `outrider serve`, and conversations with it."""

import pytest

from bench.harness.errors import BenchError
from bench.serve.outrider_system import generate, new_tokens, served, speculation
from tests.support.bench.server import TOKENS, WORDS, running


async def test_conversations_with_several_turns():
    answered = []
    async with running() as (server, url):
        seconds, talks = await generate(url, [("one", "two"), ("three",)], 2, {"temperature": 0.5}, answered.append)
        with pytest.raises(RuntimeError, match="HTTP 429: no "):
            await generate(url, [("429",)], 1, {})
    assert seconds > 0
    assert [[answer.text for answer in talk] for talk in talks] == [["".join(WORDS)] * 2, ["".join(WORDS)]]
    answers = [answer for talk in talks for answer in talk]
    assert new_tokens(answers) == 3 * TOKENS
    assert speculation(answers) == {"accept_length": 2.0, "acceptance_rate": pytest.approx(1 / 3)}
    assert speculation([]) == {"accept_length": 1.0, "acceptance_rate": 0.0}
    assert len(answered) == 3
    assert {(body["stream"], body["temperature"]) for body in server.requests[:3]} == {(False, 0.5)}


def test_errors_quote_the_message_about_rejected_flags():
    flags = ["--speculative-algorithm", "STANDALONE"]
    with (
        pytest.raises(BenchError, match=r"ended with code 2: .*STANDALONE needs a draft model"),
        served("x", flags, "auto"),
    ):
        pass
    words = r"ended with code 2: [^─]*there is no flag --nonsense"
    with pytest.raises(BenchError, match=words), served("x", ["--nonsense"], "auto"):
        pass
