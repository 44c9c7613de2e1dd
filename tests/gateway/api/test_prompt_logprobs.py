"""Log-probabilities of prompts: shapes, limits, and the target's requests."""

import asyncio
import json

import orjson
import pytest

from gateway.api.answers import prompts
from gateway.api.answers.logprobs import ChatLogprobs, CompletionLogprobs
from gateway.orchestration.generator import MAX_PROMPT_LOGPROBS
from gateway.text.offsets import TextOffsets
from gateway.text.pieces import Pieces
from gateway.text.tokenizer import ModelTokenizer
from tests.support.gateway.engines import EOS, logprobs_of, tokenizer_files
from tests.support.gateway.http import error_of, events
from tests.support.gateway.logprobs import CHAT_PROMPT, values
from tests.support.gateway.texts import HELLO, TOKENIZER


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hello A", TOKENIZER.encode("hello A").ids])
def test_an_echo_has_logprobs_of_the_prompt(gateway, prompt, stream):
    body = {"prompt": prompt, "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    response = gateway.client.post("/v1/completions", json=body)
    parts = events(response) if stream else [response.json()]
    choices = [choice for part in parts for choice in part["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == "hello ABCDEF"
        lists = {
            key: [entry for choice in own if choice["logprobs"] for entry in choice["logprobs"][key]]
            for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        assert "".join(lists["tokens"]) == "hello ABCDEF"
        count = len(lists["tokens"])
        assert lists["token_logprobs"] == [None, *values(1, count - 1)]
        assert lists["top_logprobs"][0] is None
        assert list(lists["top_logprobs"][-1].values()) == [-(count - 1) / 4]
        starts = [sum(map(len, lists["tokens"][:i])) for i in range(count)]
        assert lists["text_offset"] == starts


def test_an_echo_needs_no_logprobs_and_a_prompt_of_one_token_has_none(gateway):
    assert gateway.text("A", max_tokens=2, echo=True) == "ABC"
    parts = gateway.complete("A", max_tokens=1, echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert parts["token_logprobs"] == [None, -0.25]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[7, 8, 0], [7, 8, 9]])
def test_with_echo_logprobs_include_a_stop_token(gateway, prompt, stream):
    """Clients that score texts request one token and sum all entries but the last, as lm-eval does."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "stream": stream}
    response = gateway.client.post("/v1/completions", json=body)
    choices = [part["choices"][0] for part in (events(response) if stream else [response.json()])]
    assert choices[-1]["finish_reason"] == ("stop" if prompt[-1] + 1 == EOS else "length")
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert sum(len(choice["logprobs"][name]) for choice in choices if choice["logprobs"]) == 4
    parts = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    assert sum(parts[1:-1]) == sum(values(1, 2))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[7, 8, 0], [7, 8, 9]])
def test_logprobs_of_the_prompt_only(gateway, prompt, stream):
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = gateway.client.post("/v1/completions", json=body)
    parts = events(response) if stream else [response.json()]
    (choice,) = [choice for part in parts for choice in part["choices"]]
    assert (choice["text"], choice["finish_reason"]) == (TOKENIZER.decode(prompt), "length")
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, [])
    assert choice["logprobs"]["token_logprobs"] == [None, *values(1, 2)]
    usage = parts[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 0, 3)


def test_prompt_logprobs_in_vllm_s_form(gateway):
    body = gateway.complete("AKL", max_tokens=1, prompt_logprobs=2)
    k, ell = (TOKENIZER.encode(letter).ids[0] for letter in "KL")
    first, second, third = body["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(k)] == {"logprob": -0.25, "rank": 1, "decoded_token": "K"}
    assert second[str(k + 1)] == {"logprob": -1.25, "rank": 2, "decoded_token": "L"}
    assert third[str(ell)]["logprob"] == -0.5
    assert "prompt_logprobs" not in gateway.complete("AKL", max_tokens=1)["choices"][0]
    answer = gateway.client.post(
        "/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, "prompt_logprobs": 0}
    ).json()
    assert [len(entry or ()) for entry in answer["choices"][0]["prompt_logprobs"]] == [0] + [1] * (CHAT_PROMPT - 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/completions", {"prompt": ["AKL", "BCDE"], "prompt_logprobs": 2}),
        ("/v1/chat/completions", {"messages": HELLO, "prompt_logprobs": 2}),
    ],
)
def test_prompt_logprobs_are_computed_and_reported_once_a_prompt(gateway, target, route, body, stream):
    before = len(target.engine.seen)
    response = gateway.client.post(route, json={**body, "n": 3, "max_tokens": 30, "stream": stream})
    parts = events(response) if stream else [response.json()]
    reported = [
        choice["prompt_logprobs"] for part in parts for choice in part["choices"] if "prompt_logprobs" in choice
    ]
    prompts = len(body.get("prompt", [0]))
    assert len(reported) == prompts
    assert all(entries[0] is None and len(entries[1]) == 2 for entries in reported)
    asked = [request.prompt_logprobs for request in target.engine.seen[before:]]
    assert asked == [2, None, None] * prompts


@pytest.mark.parametrize("stream", [False, True])
def test_native_events_have_the_prompt_s_logprobs_once(gateway, target, stream):
    sampling = {"n": 2, "max_new_tokens": 30, "temperature": 0}
    body = {"input_ids": [20, 21, 22], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    before = len(target.engine.seen)
    response = gateway.client.post("/generate", json={**body, "top_logprobs_num": 1, "stream": stream})
    answers = [[], []]
    for one in events(response) if stream else response.json():
        answers[one.get("index", len(answers[0]))].append(one["meta_info"])
    for own in answers:
        assert [info["input_token_logprobs"] for info in own if info["input_token_logprobs"]] == [
            [[None, 20, None], [-0.25, 21, None], [-0.5, 22, None]]
        ]
        assert [len(info["input_top_logprobs"]) for info in own if "input_top_logprobs" in info] == [3]
        assert len(own[-1]["output_token_logprobs"]) == len(own[-1]["output_top_logprobs"]) == 30
    assert [request.prompt_logprobs for request in target.engine.seen[before:]] == [1, None]


def test_too_many_logprobs_of_prompts_are_refused(gateway):
    body = {"prompt": [7, 8] * 199, "max_tokens": 1, "n": 128, "prompt_logprobs": 20}
    assert MAX_PROMPT_LOGPROBS < 398 * 21 * 128
    error = error_of(gateway.client.post("/v1/completions", json=body), 400)
    assert error["param"] == "prompt_logprobs"
    assert "1069824 log-probabilities" in error["message"]
    assert gateway.client.post("/v1/completions", json={**body, "n": 2}).status_code == 200


async def test_other_coroutines_run_while_logprobs_of_a_prompt_are_formatted():
    count, turns = 2000, 0
    tokens = list(range(4, 204)) * 10
    logprobs = logprobs_of([*tokens, *range(20)], 1, count, 20)

    async def beside():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(beside())
    pieces = Pieces(TOKENIZER, "ByteLevel")
    offsets = TextOffsets(ModelTokenizer(tokenizer_files()), tokens, "".join(map(pieces.text, tokens)))
    for formatter in (ChatLogprobs(pieces), CompletionLogprobs(pieces, offsets)):
        turns = 0
        orjson.dumps(await prompts.echoed(formatter, tokens, logprobs))
        assert turns > 30
    turns = 0
    assert len(json.loads(orjson.dumps(await prompts.entries(pieces, tokens, logprobs)))) == count
    assert turns > 30
    task.cancel()
