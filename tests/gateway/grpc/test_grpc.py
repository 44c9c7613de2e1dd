"""The gRPC service, through the Python client."""

import asyncio
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from gateway.grpc.sending import Sender
from gateway.text.encoding import MAX_PIECES
from outrider.client import AsyncClient, Client
from outrider.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable
from outrider.speculation.draft_source import SourceKind
from outrider.transport.statuses import statuses
from tests.support.gateway.engines import REFUSED, expected, tokenizer
from tests.support.gateway.services import free_port, until

TOKENIZER = tokenizer()
A = TOKENIZER.encode("A").ids
EXAMPLE = Path(__file__).parents[3] / "docs/examples/generate.py"


@pytest.fixture(scope="module")
def client(gateway):
    with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
        yield client


def test_facts(client):
    info = client.info()
    assert (info.served_model_name, info.vocab_size, info.drafters) == ("counting", 300, ["COUNTING"])
    assert info.max_session_tokens == 400


@pytest.mark.usefixtures("proposals_in_time")
@pytest.mark.parametrize("prompt", ["A", A, np.array(A)])
def test_parts_add_up(client, prompt):
    parts = list(client.generate(prompt, max_tokens=90, temperature=0))
    assert "".join(part.text for part in parts) == TOKENIZER.decode(expected(A, 90))
    assert [t for part in parts for t in part.token_ids] == expected(A, 90)
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    last = parts[-1]
    assert (last.finish_reason, last.completion_tokens, last.prompt_tokens) == ("length", 90, 1)
    assert last.speculation.steps < 90
    assert 0 < last.speculation.accepted_tokens < last.speculation.proposed_tokens


@pytest.mark.usefixtures("proposals_in_time")
def test_draft_sources_are_chosen_and_reported(client, target):
    answer = client.complete("A", max_tokens=40, temperature=0, draft_sources=["draft", "head"])
    assert target.engine.seen[-1].draft_sources == {SourceKind.DRAFT, SourceKind.HEAD}
    assert answer.speculation.sources == {
        "draft": (answer.speculation.proposed_tokens, answer.speculation.accepted_tokens)
    }
    assert answer.speculation.accepted_tokens > 0
    for labels in (["lookup"], []):
        other = client.complete("A", max_tokens=40, temperature=0, draft_sources=labels)
        assert (other.text, other.speculation.sources) == (answer.text, {})
    assert target.engine.seen[-1].max_draft_tokens == 0
    with pytest.raises(
        InvalidRequest, match="'oracle' is no draft source; name some of draft, lookup, head, quantized"
    ):
        client.complete("A", draft_sources=["oracle"])


def test_cached_prompt_tokens_are_returned(client):
    prompt = [201, 202, 203]
    assert [client.complete(prompt, max_tokens=4, cache_salt="x").cached_tokens for _ in range(2)] == [0, 2]
    assert list(client.generate(prompt, max_tokens=4))[-1].cached_tokens == 0


def test_conversations_and_stop_strings(client):
    answer = client.complete([{"role": "user", "content": "hello"}], max_tokens=20, temperature=0, stop=["%"])
    assert answer.text == '!"#$'
    assert answer.finish_reason == "stop"
    assert len(answer.token_ids) == 5
    until(lambda: client.complete("hello", max_tokens=20, temperature=0).accept_length > 1)  # proposals may be late


@pytest.mark.parametrize(
    ("stop", "text"), [("EF", "BCD"), (["x", "EF"], "BCD"), ("FE", "BCDEFGHI"), (["FE"], "BCDEFGHI")]
)
def test_a_stop_string_is_one_text_or_several(client, stop, text):
    assert client.complete("A", max_tokens=8, temperature=0, stop=stop).text == text


@pytest.mark.parametrize("letter", ["x", "%", "\n", "é", "😀"])
def test_a_long_name_does_not_change_the_status(client, letter):
    with pytest.raises(ModelNotFound, match=f"the model `{letter * 200}") as error:
        client.complete("A", model=letter * 20_000)
    assert error.value.message.endswith(f"{letter} ...")


@pytest.mark.parametrize("prompt", ["x" * (4 << 20), [5] * (4 << 20), [{"role": "user", "content": "x" * (4 << 20)}]])
def test_a_request_that_is_too_large_is_refused_unprocessed(client, prompt):
    with pytest.raises(InvalidRequest, match="at most 4194304 are allowed"):
        client.complete(prompt)


def test_the_returned_seed_repeats_the_text(client):
    first = client.complete("A", max_tokens=20)
    assert client.complete("A", max_tokens=20, seed=first.seed).text == first.text
    assert client.complete("A", max_tokens=3, seed=2**64 - 1).text == "BCD"  # stride 1


def test_penalties_and_bias_reach_the_target(client, target):
    client.complete("A", max_tokens=2, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.1,
                    logit_bias={7: -100.0})  # fmt: skip
    sampling = target.engine.seen[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.1)
    assert sampling.logit_bias == ((7, -100.0),)
    client.complete("A", max_tokens=2)
    assert not target.engine.seen[-1].sampling.adjusts


def test_limits_default_to_the_rest_of_the_context(client):
    assert len(client.complete([5] * 350, temperature=0, ignore_eos=True).token_ids) == 50


@pytest.mark.parametrize(
    ("error", "prompt", "options"),
    [
        (InvalidRequest, "A", {"temperature": -1.0}),
        (InvalidRequest, "A", {"repetition_penalty": 0.0}),
        (InvalidRequest, "A", {"logit_bias": {300: 1.0}}),
        (InvalidRequest, [300], {}),
        (InvalidRequest, [REFUSED], {}),
        (InvalidRequest, [], {}),
        (InvalidRequest, [{"role": "user", "content": "x"}] * (MAX_PIECES + 1), {}),
        (InvalidRequest, "A", {"max_tokens": 0}),
        (ContextTooLong, [5] * 500, {}),
        (ModelNotFound, "A", {"model": "gpt-7"}),
    ],
)
def test_errors_have_their_kind(client, error, prompt, options):
    with pytest.raises(error) as caught:
        client.complete(prompt, **options)
    assert type(caught.value) is error


def test_an_unreachable_gateway_is_unavailable():
    with Client(f"127.0.0.1:{free_port()}") as client, pytest.raises(Unavailable):
        client.complete("A", timeout=5)


async def test_async_generations_side_by_side(gateway):
    async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}") as client:
        assert (await client.info()).served_model_name == "counting"
        answers = await asyncio.gather(*(client.complete([i, i], max_tokens=30, temperature=0) for i in range(20, 40)))
    assert [a.token_ids for a in answers] == [expected([i], 30) for i in range(20, 40)]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_leaving_early_frees_the_session(gateway, target, draft, client, how):
    async def first_part():
        async with AsyncClient(f"127.0.0.1:{gateway.grpc_port}") as client:
            async for _ in client.generate("A", temperature=0, ignore_eos=True):
                assert target.sessions == 1
                break

    target.engine.delay = 0.3
    try:
        if how == "async":
            asyncio.run(first_part())
        else:
            parts = client.generate("A", temperature=0, ignore_eos=True)
            next(parts)
            assert target.sessions == 1
            parts.close()
        until(lambda: target.sessions == 0 and draft.sessions == 0, seconds=30)  # the whole text takes 40 s
    finally:
        target.engine.delay = target.delay


def test_the_example_runs(gateway):
    command = [sys.executable, str(EXAMPLE), "Why?", f"127.0.0.1:{gateway.grpc_port}"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    assert "[counting]" in output
    assert "tokens in" in output


async def test_a_call_whose_client_does_not_read_ends_and_frees_its_place():
    freed = asyncio.Event()

    async def stream(request, context):
        async with statuses(context):
            sender = Sender(context, [], 0.3)
            try:
                while True:
                    await sender.send(bytes(1 << 16))
            finally:
                freed.set()

    server = grpc.aio.server()
    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/test/Stream")(b"")
        assert len(await call.read()) == 1 << 16
        await asyncio.wait_for(freed.wait(), 20)

        async def rest():
            while await call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as error:  # once the client reads again
            await rest()
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "did not read" in error.value.details()
    await server.stop(0)
