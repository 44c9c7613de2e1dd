"""SGLang's native routes: /generate, tokenizer, control and health."""

import concurrent.futures
import itertools
import json
import threading

import pytest

from tests.support.gateway.engines import EOS, REFUSED, VOCAB, expected, tokenizer
from tests.support.gateway.services import until

TOKENIZER = tokenizer()


def ids(text):
    return TOKENIZER.encode(text).ids


A = ids("A")


def generate(gateway, status=200, **body):
    response = gateway.client.post("/generate", json=body)
    assert response.status_code == status, response.text
    return response.json()


def greedy(count, **options):
    return {"temperature": 0, "max_new_tokens": count, **options}


@pytest.mark.usefixtures("proposals_in_time")
@pytest.mark.parametrize("prompt", [{"text": "A"}, {"input_ids": A}])
def test_text_and_token_ids(gateway, prompt):
    body = generate(gateway, **prompt, sampling_params=greedy(90), rid="mine")
    assert body["text"] == TOKENIZER.decode(expected(A, 90))
    assert body["output_ids"] == expected(A, 90)
    info = body["meta_info"]
    assert info["id"] == "mine"
    assert info["finish_reason"] == {"type": "length", "length": 90}
    assert (info["prompt_tokens"], info["completion_tokens"]) == (1, 90)
    assert info["spec_num_correct_drafts"] == info["spec_accept_token_num"] > 0
    assert info["spec_accept_length"] == 90 / info["spec_verify_ct"] > 1
    assert info["e2e_latency"] > 0
    assert "output_token_logprobs" not in info


def test_default_limit_and_finish_reasons(gateway):
    assert generate(gateway, text="A", sampling_params={"temperature": 0})["meta_info"]["completion_tokens"] == 128
    body = generate(gateway, text="A", sampling_params=greedy(9, stop=["DE"]))
    assert (body["text"], body["meta_info"]["finish_reason"]) == ("BC", {"type": "stop", "matched": "DE"})
    body = generate(gateway, input_ids=[VOCAB - 3], sampling_params=greedy(9))
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert body["output_ids"][-1] == EOS
    body = generate(gateway, text="A", sampling_params=greedy(9, stop="DE", no_stop_trim=True))
    assert body["text"] == "BCDE"


def test_unsupported_fields_may_be_null(gateway):
    nothing = {
        "stop_regex": None,
        "structural_tag": None,
        "custom_params": None,
        "stream_interval": None,
        "regex": None,
    }
    assert generate(gateway, text="A", sampling_params=greedy(2, **nothing))["text"] == "BC"


def test_each_prompt_of_a_batch_has_its_parameters(gateway):
    body = generate(
        gateway, text=["A", "K"], rid=["a", "k"], sampling_params=[greedy(3), greedy(2)], return_logprob=[True, False]
    )
    assert [(b["text"], b["meta_info"]["id"]) for b in body] == [("BCD", "a"), ("LM", "k")]
    assert len(body[0]["meta_info"]["output_token_logprobs"]) == 3
    assert "output_token_logprobs" not in body[1]["meta_info"]
    assert [b["text"] for b in generate(gateway, input_ids=[A], sampling_params=greedy(2))] == ["BC"]
    several = generate(gateway, text="A", sampling_params={"max_new_tokens": 4, "n": 3, "sampling_seed": 6})
    assert [b["text"] for b in several] == ["BCDE", "CEGI", "DGJM"]


def test_log_probabilities(gateway):
    options = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    info = generate(gateway, input_ids=[20, 21, 22], sampling_params=greedy(2), logprob_start_len=1, **options)[
        "meta_info"
    ]
    names = [TOKENIZER.decode([token]) for token in range(21, 25)]
    assert info["input_token_logprobs"] == [[None, 21, names[0]], [-0.5, 22, names[1]]]
    assert info["output_token_logprobs"] == [[-0.75, 23, names[2]], [-1.0, 24, names[3]]]
    assert info["output_top_logprobs"][0][0] == [-0.75, 23, names[2]]
    assert len(info["output_top_logprobs"][1]) == 2
    assert info["input_top_logprobs"][0] is None
    plain = generate(gateway, input_ids=[20, 21], sampling_params=greedy(1), return_logprob=True)["meta_info"]
    assert (plain["input_token_logprobs"], len(plain["output_token_logprobs"])) == ([], 1)
    assert plain["output_token_logprobs"][0][2] is None


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_prompt_only(gateway, stream):
    """Clients that score given texts send this request."""
    options = {"sampling_params": greedy(0), "return_logprob": True, "logprob_start_len": 0, "stream": stream}
    response = gateway.client.post("/generate", json={"input_ids": [20, 21, 22], **options})
    (body,) = [
        json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if "[DONE]" not in line and line
    ]
    info = body["meta_info"]
    assert (body["text"], body["output_ids"], info["completion_tokens"]) == ("", [], 0)
    assert info["finish_reason"] == {"type": "length", "length": 0}
    assert info["input_token_logprobs"] == [[None, 20, None], [-0.25, 21, None], [-0.5, 22, None]]
    assert info["output_token_logprobs"] == []


def test_events_repeat_everything_so_far(gateway):
    body = {"text": "A", "sampling_params": greedy(60), "stream": True, "return_logprob": True}
    response = gateway.client.post("/generate", json=body)
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    parsed = [json.loads(line) for line in lines]
    assert len(parsed) > 1
    assert all(b["text"].startswith(a["text"]) for a, b in itertools.pairwise(parsed))
    assert all(one["meta_info"]["finish_reason"] is None for one in parsed[:-1])
    assert parsed[-1]["output_ids"] == expected(A, 60)
    assert [len(one["meta_info"]["output_token_logprobs"]) for one in parsed] == [
        len(one["output_ids"]) for one in parsed
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "A", "input_ids": A}, "text"),
        ({"text": []}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [VOCAB]}, "input_ids"),
        ({"input_ids": [REFUSED]}, "input_ids"),  # refused by the target
        ({"text": "A" * 500}, "text"),
        ({"text": ["A", "K"], "rid": ["one"]}, "rid"),
        ({"text": ["A"] * 1025}, "n"),
        ({"text": ["A"] * 513, "sampling_params": {"n": 2}}, "n"),
        ({"text": ["A"] * 9, "sampling_params": [{"n": 128}] * 9}, "n"),
        ({"text": ["A"] * 1025, "sampling_params": [{"n": 1}]}, "n"),
        ({"text": "A", "lora_path": "x"}, "lora_path"),
        ({"text": "A", "priority": -(2**31)}, "priority"),
        ({"text": "A", "sampling_params": {"stop_regex": "x"}}, "sampling_params.stop_regex"),
        ({"text": "A", "sampling_params": {"custom_params": {}}}, "sampling_params.custom_params"),
        ({"text": "A", "sampling_params": {"unknown": None}}, "sampling_params.unknown"),
        ({"text": "A", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "A", "return_logprob": True, "logprob_start_len": 7}, "logprob_start_len"),
        ({"text": "A", "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
    ],
)
def test_errors_name_the_field(gateway, body, param):
    error = generate(gateway, 400, **body)["error"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/generate", "q1"),
        ("/v1/completions", "cmpl-q1"),
        ("/v1/chat/completions", "q1"),
    ],  # one with the prefix of an answer's id
)
def test_a_request_is_aborted_by_id(gateway, target, route, name):
    limit = {"max_tokens": 350, "ignore_eos": True, "request_id": name}
    bodies = {
        "/generate": {"text": "A", "rid": name, "sampling_params": greedy(350, ignore_eos=True)},
        "/v1/completions": {"prompt": "A", **limit},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], **limit},
    }
    answers = []
    target.engine.delay = 0.1
    try:
        thread = threading.Thread(target=lambda: answers.append(gateway.client.post(route, json=bodies[route]).json()))
        thread.start()
        until(lambda: target.sessions == 1)
        assert gateway.client.post("/abort_request", json={"rid": "q"}).json()["aborted_requests"] == 0
        assert gateway.client.post("/abort_request", json={"rid": name}).json()["aborted_requests"] == 1
        thread.join(60)
        until(lambda: target.sessions == 0)
    finally:
        target.engine.delay = target.delay
    (answer,) = answers
    reason = (
        answer["meta_info"]["finish_reason"]["type"] if route == "/generate" else answer["choices"][0]["finish_reason"]
    )
    assert reason == "abort"
    assert gateway.client.post("/abort_request", json={}).status_code == 400


def test_an_abort_ends_the_requests_of_exactly_its_id(gateway, target, monkeypatch):
    """All prompts and choices of them; ids that begin so are others'."""
    monkeypatch.setattr(target.engine, "delay", 0.1)
    ends = {}

    def ask(name):
        body = {"text": ["A", "B"], "rid": name, "sampling_params": greedy(350, ignore_eos=True, n=2)}
        answers = gateway.client.post("/generate", json=body).json()
        ends[name] = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]

    def abort(**body):
        response = gateway.client.post("/abort_request", json=body)
        return response.json()["aborted_requests"] if response.status_code == 200 else response.status_code

    threads = [threading.Thread(target=ask, args=[name]) for name in ("job", "job-2")]
    for thread in threads:
        thread.start()
    until(lambda: target.sessions == 8)
    assert [abort(rid=rid) for rid in ("j", "job-", "jo", "gen")] == [0, 0, 0, 0]
    for several in ({"rid": "job", "prefix": True}, {"rid": ""}, {"rid": None}, {}):
        assert abort(**several) == 400
    assert abort(rid="job-2-1") == 2  # the second choice of each prompt
    assert abort(rid="job") == 4
    assert abort(rid="job-2") == 2
    for thread in threads:
        thread.join(60)
    assert ends == dict.fromkeys(("job", "job-2"), ["abort"] * 4)


# --- the tokenizer ---


def test_tokenize_and_back(gateway):
    post = gateway.client.post
    body = post("/tokenize", json={"model": "default", "prompt": "hello", "return_token_strs": True}).json()
    assert body["tokens"] == ids("hello")
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 400)
    assert "".join(body["token_strs"]) == "hello"
    several = post("/v1/tokenize", json={"prompt": ["A", "hello"]}).json()
    assert (several["tokens"], several["count"]) == ([A, ids("hello")], [1, len(ids("hello"))])
    chat = post("/tokenize", json={"messages": [{"role": "user", "content": "A"}]}).json()
    assert chat["tokens"] == [2, *A, 3]
    bare = {"messages": [{"role": "user", "content": "A"}], "add_generation_prompt": False}
    assert post("/tokenize", json=bare).json()["tokens"] == [2, *A]
    tools = [{"type": "function", "function": {"name": "f"}}]  # this template takes no tools
    offered = {"messages": [{"role": "user", "content": "A"}], "tools": tools}
    parsed = post("/v1/chat/completions", json={**offered, "max_tokens": 1, "return_token_ids": True}).json()
    assert post("/tokenize", json=offered).json()["tokens"] == parsed["prompt_token_ids"]
    assert post("/tokenize", json={**offered, "tools": [{}]}).json()["error"]["param"] == "tools.0"
    text = post("/detokenize", json={"tokens": chat["tokens"]}).json()
    assert text == {"prompt": "<|user|>A<|assistant|>", "text": "A"}
    assert post("/detokenize", json={"tokens": [A, ids("hello")]}).json()["text"] == ["A", "hello"]
    assert post("/detokenize", json={"tokens": [VOCAB]}).json()["error"]["param"] == "tokens"
    assert post("/tokenize", json={}).status_code == 400
    settings = gateway.client.get("/tokenizer_info").json()
    assert (settings["eos_token"], settings["model_max_length"]) == ("<|end|>", int(1e30))


# --- health, facts, and the page that describes it all ---


def test_health_routes(gateway, target):
    for path in ("/health", "/health/live", "/health/ready", "/health_generate"):
        assert gateway.client.get(path).json()["status"] == "ok"
    assert target.engine.seen[-1].stop.max_tokens == 1
    opened = target.engine.opened
    with concurrent.futures.ThreadPoolExecutor(4) as pool:  # strangers share one probe
        answers = list(pool.map(gateway.client.get, ["/health_generate"] * 8))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert target.engine.opened == opened
    assert gateway.client.get("/get_model_info").json()["is_generation"] is True


def test_the_openapi_page_describes_the_routes(gateway):
    page = gateway.client.get("/openapi.json").json()
    for path in (
        "/generate",
        "/v1/responses",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/abort_request",
    ):
        operation = page["paths"][path]["post"]
        assert operation["requestBody"]["content"]["application/json"]["schema"]
        assert "400" in operation["responses"]
        assert "422" not in operation["responses"]
        assert operation["description"]
        parsed = set(operation["responses"]["200"]["content"])
        assert parsed == {"application/json"} | ({"text/event-stream"} if "generat" in operation["tags"][0] else set())
    assert page["components"]["schemas"]["ErrorBody"]
    assert gateway.client.get("/docs").status_code == 200
