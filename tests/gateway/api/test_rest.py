"""The OpenAI routes over real sockets: shapes, texts that can be computed by hand, and sessions that are freed."""

import concurrent.futures
import threading

import httpx
import numpy as np
import openai
import pytest

from outrider.speculation.proposal import FinishReason
from tests.support.gateway.engines import EOS, VOCAB, expected
from tests.support.gateway.http import events
from tests.support.gateway.services import until
from tests.support.gateway.texts import HELLO, decoded, ids

# --- completions ---


def test_completion(gateway):
    body = gateway.complete("A", max_tokens=9)
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == ("BCDEFGHIJ", "length", 0)
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (1, 9, 10)


def test_speculation_shows_in_the_usage(gateway):
    accepted = rejected = 0

    def enough():  # takes several requests on a loaded machine, where proposals are late
        nonlocal accepted, rejected
        details = gateway.complete("A", max_tokens=90)["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] < 90
        accepted += details["accepted_prediction_tokens"]
        rejected += details["rejected_prediction_tokens"]
        return accepted > 20 and rejected > 5  # one of three proposed tokens is wrong

    until(enough, 60)


def test_completions_end_after_sixteen_tokens_by_default(gateway):
    assert gateway.complete("A")["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [["A", "K"], [ids("A"), ids("K")]])
def test_prompts_in_lists_are_answered_in_order(gateway, prompt):
    choices = gateway.complete(prompt, max_tokens=3)["choices"]
    assert [(c["index"], c["text"]) for c in choices] == [(0, "BCD"), (1, "LMN")]


def test_token_ids_are_used_unchanged(gateway):
    body = gateway.complete([7, 8, 20], max_tokens=5, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [21, 22, 23, 24, 25]
    assert body["usage"]["prompt_tokens"] == 3


def test_choices_have_consecutive_seeds(gateway):
    body = gateway.complete("A", max_tokens=4, n=3, temperature=1, seed=6)  # strides 1, 2 and 3
    assert [c["text"] for c in body["choices"]] == ["BCDE", "CEGI", "DGJM"]
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == 1


def test_penalties_and_bias_reach_the_target(client, target):
    client.completions.create(
        model="default", prompt="A", max_tokens=2, temperature=0, presence_penalty=0.5, frequency_penalty=-1,
        logit_bias={"7": -100, "8": 2.5}, extra_body={"repetition_penalty": 1.1},
    )  # fmt: skip
    sampling = target.engine.seen[-1].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.1)
    assert sampling.logit_bias == ((7, -100.0), (8, 2.5))


def test_negative_seeds_and_none_are_allowed(gateway, target):
    first = gateway.text("A", max_tokens=6, temperature=1, seed=-5)
    assert gateway.text("A", max_tokens=6, temperature=1, seed=-5) == first
    gateway.text("A", max_tokens=6, temperature=1)
    gateway.text("A", max_tokens=6, temperature=1)
    seeds = [request.sampling.seed for request in target.engine.seen[-4:]]
    assert seeds[0] == seeds[1] == 2**64 - 5
    assert seeds[2] != seeds[3]


@pytest.mark.usefixtures("proposals_in_time")
def test_streamed_completion_equals_the_plain_one(gateway):
    body = {"model": "default", "prompt": "A", "temperature": 0, "max_tokens": 120, "stream": True}
    response = gateway.client.post("/v1/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    chunks = events(response)
    assert {c["object"] for c in chunks} == {"text_completion"}
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert "".join(c["choices"][0]["text"] for c in chunks) == gateway.text("A", max_tokens=120)
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    assert 1 < len(chunks) < 120  # one chunk per commit


def test_streams_of_several_choices_interleave_by_index(gateway):
    body = {"model": "default", "prompt": ["A", "K"], "max_tokens": 5, "n": 2, "seed": 0, "stream": True}
    texts, reasons = {}, {}
    for chunk in events(gateway.client.post("/v1/completions", json=body)):
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice["finish_reason"]:
                assert choice["index"] not in reasons
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "BCDEF", 1: "CEGIK", 2: "LMNOP", 3: "MOQSU"}
    assert reasons == dict.fromkeys(range(4), "length")


def test_half_characters_are_never_sent(gateway):
    """Some tokens are single bytes of a character; the pieces must add up to the whole text."""
    prompt = ids("~")
    whole = decoded(expected(prompt, 150))
    assert "\ufffd" in whole
    assert gateway.text(prompt, max_tokens=150) == whole
    body = {"model": "default", "prompt": prompt, "temperature": 0, "max_tokens": 150, "stream": True}
    chunks = events(gateway.client.post("/v1/completions", json=body))
    assert "".join(c["choices"][0]["text"] for c in chunks) == whole


# --- ends ---


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [("EFG", "BCD", 6), (["XYZ", "FGH", "G"], "BCDEF", 6), ("B", "", 1), (["no", "such"], "BCDEFGHIJKLM", 12)],
)
def test_stop_strings(gateway, target, draft, stream, stop, text, tokens):
    body = {"model": "default", "prompt": "A", "temperature": 0, "max_tokens": 12, "stop": stop, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = gateway.client.post("/v1/completions", json=body)
    parts = events(response) if stream else [response.json()]
    assert "".join(p["choices"][0]["text"] for p in parts if p["choices"]) == text
    reason = [p["choices"][0]["finish_reason"] for p in parts if p["choices"]][-1]
    assert reason == ("length" if tokens == 12 else "stop")
    assert parts[-1]["usage"]["completion_tokens"] == tokens
    until(lambda: target.sessions == 0 and draft.sessions == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_ends_with_its_stop_string_and_not_with_the_last_of_its_answer(gateway, target, monkeypatch, stream):
    monkeypatch.setattr(target.engine, "delay", 0.03)
    body = {"prompt": [[40], [140]], "stop": decoded([43]), "temperature": 0, "max_tokens": 120, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.client.post, "/v1/completions", json=body | {"stream": stream})
        until(lambda: [one.request.tokens.tolist() for one in list(target.engine.sessions.values())] == [[140]])
    parts = events(answer.result()) if stream else [answer.result().json()]
    ends = {c["index"]: c["finish_reason"] for part in parts for c in part["choices"] if c["finish_reason"]}
    assert ends == {0: "stop", 1: "length"}


def test_an_incomplete_stop_string_is_returned_at_the_end(gateway):
    assert gateway.text("A", max_tokens=4, stop="DEFG") == "BCDE"


def test_the_end_of_sequence_token_is_not_part_of_the_text(gateway):
    near_end = [VOCAB - 3]
    body = gateway.complete(near_end, max_tokens=20, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["token_ids"] == [VOCAB - 2, VOCAB - 1, 0, EOS]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == decoded([VOCAB - 2, VOCAB - 1])
    assert gateway.complete(near_end, max_tokens=20, ignore_eos=True)["usage"]["completion_tokens"] == 20
    assert gateway.complete(near_end, max_tokens=20, min_tokens=10)["usage"]["completion_tokens"] == 20


def test_stop_tokens_of_the_request(gateway):
    choice = gateway.complete("A", max_tokens=20, stop_token_ids=ids("E"))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("BCD", "stop")


# --- other routes ---


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "counting"
    assert client.models.retrieve("counting").id == "counting"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("some/other")
    assert error.value.code == "model_not_found"


def test_the_served_name_is_accepted(client):
    assert client.completions.create(model="counting", prompt="A", max_tokens=1).model == "counting"


def test_facts_and_health(gateway):
    assert gateway.client.get("/health").status_code == 200
    for path in ("/health", "/health/live", "/v1/models"):  # as probes send it: the same status and headers
        head, whole = gateway.client.head(path), gateway.client.get(path)
        assert (head.status_code, head.content, head.headers["content-type"]) == (200, b"", "application/json")
        assert abs(int(head.headers["content-length"]) - len(whole.content)) < 20
    assert "version" in gateway.client.get("/version").json()
    for path in ("/get_server_info", "/server_info"):
        assert gateway.client.get(path).json()["targets"][0]["model"]["fingerprint"] == "f1"


def test_request_ids_are_echoed_or_made(gateway):
    assert gateway.client.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    response = gateway.client.post("/v1/completions", json={"prompt": "A"}, headers={"X-Request-Id": "q7"})
    assert response.headers["x-request-id"] == "q7"
    assert response.json()["id"].endswith("q7")
    assert len(gateway.client.get("/health").headers["x-request-id"]) > 8


def test_cached_prompt_tokens_show_in_the_usage(gateway):
    def cached(prompt, **options):
        body = gateway.complete(prompt, max_tokens=4, **options)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    before = gateway.metric("outrider_cached_prompt_tokens_total")
    prompt = [77, 41, 93, 12]
    assert [cached(prompt), cached(prompt), cached([*prompt[:2], 8])] == [0, 3, 2]
    assert [cached(prompt, cache_salt="mine"), cached(prompt, cache_salt="mine")] == [0, 3]
    assert cached([[31, 32, 33], [31, 32, 34]], n=2) == 0 + 2  # each prompt counts once
    assert gateway.metric("outrider_cached_prompt_tokens_total") - before == 3 + 2 + 3 + (2 + 2 + 2)


@pytest.mark.usefixtures("proposals_in_time")
def test_metrics_count(gateway):
    names = ("generated_tokens_total", "accepted_draft_tokens_total", "steps_with_draft_total", "prompt_tokens_total")
    before = {name: gateway.metric(f"outrider_{name}") for name in names}
    gateway.complete("A", max_tokens=40)
    after = {name: gateway.metric(f"outrider_{name}") - before[name] for name in names}
    assert after["generated_tokens_total"] == 40
    assert after["prompt_tokens_total"] == 1
    assert after["accepted_draft_tokens_total"] > 0
    assert after["steps_with_draft_total"] > 0
    assert gateway.metric("outrider_time_to_first_token_seconds_count") > 0
    assert gateway.metric("outrider_inter_token_latency_seconds_count") > 0
    assert gateway.metric("outrider_service_up", service="draft") == 1
    assert gateway.metric("outrider_service_up", service="target") == 1


def test_commits_of_several_steps_in_a_frame_are_one_chunk_and_several_steps(gateway, target, monkeypatch):
    names = ("generated_tokens_total", "inter_token_latency_seconds_count", "verification_steps_total")
    engine, step = target.engine, target.engine.step

    def gathering():
        output = step()
        output.urgent = any(c.base_length == 1 or c.finish_reason != FinishReason.RUNNING for c in output.commits)
        return output

    def returned():
        return np.array([gateway.metric(f"outrider_{name}") for name in names])

    alone = gateway.text("A", max_tokens=40)
    monkeypatch.setattr(type(engine), "coalesce_seconds", 60.0)
    monkeypatch.setattr(engine, "step", gathering)
    before = returned()
    text = gateway.text("A", max_tokens=40)
    tokens, gaps, steps = returned() - before
    assert text == alone
    assert (tokens, gaps) == (40, 1)  # the first chunk has no gap
    assert steps > 2


# --- clients that go away ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_session(gateway, target, draft, path, stream):
    body = {"model": "default", "max_tokens": 350, "ignore_eos": True, "stream": stream, "temperature": 0}
    body |= {"prompt": "A"} if path == "/v1/completions" else {"messages": HELLO}
    target.engine.delay = 0.3
    gone = threading.Event()

    def ask():
        try:
            with httpx.stream("POST", gateway.url + path, json=body, timeout=1.5 if not stream else 30) as response:
                for _ in response.iter_lines():
                    break
        except httpx.TimeoutException:
            pass
        gone.set()

    try:
        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: target.sessions == 1)
        assert gone.wait(60)
        until(lambda: target.sessions == 0 and draft.sessions == 0, seconds=30)  # the whole text takes 35 s
        thread.join()
    finally:
        target.engine.delay = target.delay
    assert gateway.metric("outrider_running_requests") == 0
