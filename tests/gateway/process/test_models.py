"""Several models behind one gateway of two worker processes: requests and control calls reach the named one alone."""

import contextlib
import shutil
import signal

import grpc
import httpx
import pytest

from outrider.wire.v1 import common_pb2, draft_pb2, gateway_pb2, gateway_pb2_grpc, target_pb2
from tests.support.gateway.browser import Browser
from tests.support.gateway.engines import FakeDraft, FakeTarget
from tests.support.gateway.http import error_of
from tests.support.gateway.router_clients import VllmClient
from tests.support.gateway.services import Draft, Gateway, Service, Target, answers, until
from tests.support.gateway.streaming import Stream, started

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FIRST, SECOND, EMPTY = "first", "org/second", "third"
WORKERS = 2


class Doubling:
    """An engine that counts in steps of two."""

    def open(self, request):
        super().open(request)
        self.sessions[request.session_id].stride *= 2


class DoublingTarget(Doubling, FakeTarget):
    pass


class DoublingDraft(Doubling, FakeDraft):
    pass


class Controlled(Target):
    """A target that notes which control calls reach it."""

    calls: list

    async def FlushCache(self, request, context):
        self.hub.engine.engine.calls.append("flush")
        return target_pb2.FlushCacheResponse()

    async def UpdateWeightsFromDisk(self, request, context):
        before = self.model.fingerprint
        self.model.fingerprint = request.folder
        self.hub.engine.engine.calls.append("weights")
        facts = common_pb2.WeightFacts(
            weight_version=request.update.weight_version, fingerprint=request.folder, fingerprint_before=before,
            folder=request.folder, whole=True,
        )  # fmt: skip
        return target_pb2.UpdateWeightsFromDiskResponse(weights=facts)


class DoublingControlled(Controlled):
    engine_class = DoublingTarget


class ControlledDraft(Draft):
    async def FlushDraft(self, request, context):
        return draft_pb2.FlushDraftResponse()


class SecondDraft(ControlledDraft):
    engine_class = DoublingDraft


def service(kind, folder, name, **options):
    found = Service(kind, f"unix:{folder}/{name}", **options).start()
    found.engine.calls = []
    return found


@pytest.fixture(scope="module")
def targets(folder):
    found = {
        FIRST: service(Controlled, folder, "first", delay=0.01, first="f1"),
        SECOND: service(DoublingControlled, folder, "second", delay=0.01, fingerprint="g1", vocab_hash="v2"),
    }
    yield found
    for one in found.values():
        one.stop()


@pytest.fixture(scope="module")
def drafts(folder):
    found = {
        FIRST: service(ControlledDraft, folder, "draft-1"),
        SECOND: service(SecondDraft, folder, "draft-2", vocab_hash="v2"),
    }
    yield found
    for one in found.values():
        one.stop()


@pytest.fixture(scope="module")
def gateway(folder, targets, drafts):
    file = folder / "models.toml"
    file.write_text(
        f'[{FIRST}]\nserved-model-name = "one"\ntarget = "{targets[FIRST].address}"\n'
        f'draft = ["{drafts[FIRST].address}"]\n'
        f'["{SECOND}"]\ntarget = ["{targets[SECOND].address}"]\ndraft = "{drafts[SECOND].address}"\n'
        f'[{EMPTY}]\nmodel-path = "org/third"\n'
    )
    process = Gateway(folder, None, models=file, gateway_workers=WORKERS, enable_log_requests=True)
    until(lambda: answers(process, "/health/ready") == 200, seconds=120)
    until(lambda: f"{WORKERS} workers serve" in process.log.read_text(), seconds=60)
    for model in (FIRST, SECOND):
        until(lambda model=model: all_say(process, f"/health?model={model}", "ok"))
    yield process
    assert process.stop() == 0


def all_say(gateway, path, status):
    """True if several new connections, which reach all workers, get this status in the body."""
    with contextlib.suppress(httpx.TransportError):
        return all(httpx.get(gateway.url + path).json()["status"] == status for _ in range(8))
    return False


def text(gateway, model, prompt="A"):
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": 3}
    answer = gateway.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == (FIRST if model in (None, "default") else model)
    return answer.json()["choices"][0]["text"]


def workers(gateway, **query):
    return gateway.client.get("/workers", params=query, headers=gateway.admin).json()["workers"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [(FIRST, "BCD"), ("one", "BCD"), ("default", "BCD"), (None, "BCD"), (SECOND, "CEG")],
)
def test_the_name_in_a_request_chooses_the_model(gateway, model, expected):
    assert text(gateway, model) == expected
    messages = [{"role": "user", "content": "A"}]
    chat = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 3}
    answer = gateway.client.post("/v1/chat/completions", json=chat).json()
    assert answer["model"] == (model if model in ("one", SECOND) else FIRST)
    native = {"model": model, "text": "A", "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
    assert gateway.client.post("/generate", json=native).json()["text"] == expected
    with grpc.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.GenerateRequest(model=model or "", text="A", temperature=0, max_tokens=3)
        assert "".join(part.text for part in stub.Generate(request, timeout=30)) == expected
        info = stub.GetGatewayInfo(gateway_pb2.GetGatewayInfoRequest(model=model or ""), timeout=30)
        assert info.served_models == [FIRST, "one", SECOND, EMPTY]
        assert info.served_model_name == (SECOND if model == SECOND else FIRST)
        assert (
            VllmClient(channel).whole(max_tokens=1).output_ids[0]
            == VllmClient(channel).request().tokenized.input_ids[0] + 1
        )


def test_the_log_of_answers_names_the_model(gateway):
    text(gateway, SECOND)
    until(lambda: f"an answer of {SECOND} ended" in gateway.log.read_text())


def test_a_name_that_is_not_served(gateway):
    error = error_of(gateway.client.post("/v1/completions", json={"model": "other", "prompt": "A"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "`first` or `one` or `org/second` or `third`" in error["message"]
    names = [one["id"] for one in gateway.client.get("/v1/models").json()["data"]]
    assert names == [FIRST, "one", SECOND, EMPTY]
    assert gateway.client.get(f"/v1/models/{SECOND}").json()["id"] == SECOND


def test_each_model_has_its_own_drafts(gateway, drafts):
    for model in (FIRST, SECOND):
        stream = Stream(gateway, model=model, max_tokens=100)
        stream.join(40)
        assert len(stream.tokens) == 100
        assert gateway.metric("outrider_accepted_draft_tokens_total", model=model) > 0
        assert drafts[model].engine.opened > 0
    assert gateway.metric("outrider_generated_tokens_total", model=EMPTY) == 0
    infos = gateway.client.get("/get_server_info").json()
    assert infos["served_model_name"] == FIRST
    assert [infos["models"][model]["targets"][0]["model"]["fingerprint"] for model in (FIRST, SECOND)] == ["f1", "g1"]
    assert gateway.client.get("/get_server_info", params={"model": SECOND}).json()["served_model_name"] == SECOND


def test_a_model_with_an_empty_pool_is_unavailable_alone(gateway):
    answer = gateway.client.post("/v1/completions", json={"model": EMPTY, "prompt": "A"})
    assert "the model `third` has no target: its pool is empty" in error_of(answer, 503)["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert answers(gateway, "/health/ready") == 200
    assert answers(gateway, f"/health/ready?model={EMPTY}") == 503
    assert gateway.client.get("/ready").json()["models"] == {FIRST: "ok", SECOND: "ok", EMPTY: "unavailable"}
    health = gateway.client.get("/health").json()
    assert (health["status"], health["missing"]) == ("degraded", ["third: target: the pool is empty"])
    assert gateway.client.get("/health_generate", params={"model": SECOND}).json() == {"status": "ok"}
    assert answers(gateway, f"/health_generate?model={EMPTY}") == 503


@pytest.mark.parametrize(
    ("method", "route", "body", "effect"),
    [
        ("POST", "/pause_generation", {"mode": "in_place"}, lambda engine: engine.held),
        ("POST", "/continue_generation", None, lambda engine: not engine.held),
        ("POST", "/flush_cache", None, lambda engine: engine.calls.count("flush")),
        (
            "POST",
            "/update_weights_from_disk",
            {"model_path": "/w", "weight_version": "7"},
            lambda e: "weights" in e.calls,
        ),
        ("GET", "/get_weight_version", None, lambda _: True),
    ],
)
def test_control_calls_reach_the_named_model_alone(gateway, targets, method, route, body, effect):
    def call(**query):
        return gateway.client.request(method, route, json=body, params=query, headers=gateway.admin)

    before = targets[FIRST].engine.calls[:]
    assert "this gateway serves 3 models" in error_of(call(), 400)["message"]
    assert error_of(call(model="other"), 404)["code"] == "model_not_found"
    assert error_of(call(model=EMPTY), 503)
    assert call(model=SECOND).status_code == 200
    assert effect(targets[SECOND].engine)
    assert not targets[FIRST].engine.held
    assert targets[FIRST].engine.calls == before
    if route == "/get_weight_version":
        assert call(model=SECOND).json()["weight_version"] == "7"
        assert call(model=FIRST).json()["weight_version"] == ""
        assert text(gateway, SECOND) == "CEG"


def test_replicas_join_and_leave_the_pools_of_a_model(gateway, folder, targets, drafts):
    late = service(Controlled, folder, "late", delay=0.01, model_path="org/third")
    try:
        known = {one["address"]: one["model_id"] for one in workers(gateway)}
        assert known == {one.address: model for group in (targets, drafts) for model, one in group.items()}
        assert [one["model_id"] for one in workers(gateway, model=SECOND)] == [SECOND, SECOND]

        def post(**body):
            return gateway.client.post("/workers", json={"url": late.address, **body}, headers=gateway.admin)

        error = error_of(post(), 400)
        assert (error["param"], "`model_id`" in error["message"]) == ("model_id", True)
        assert error_of(post(model_id="other"), 404)
        query = {"url": targets[FIRST].address, "model": EMPTY}
        gateway.client.post("/add_worker", params=query, headers=gateway.admin).raise_for_status()
        reason = "serves counting; its pool is for org/third"
        until(lambda: any(reason in (one["reason"] or "") for one in workers(gateway, model=EMPTY)))
        asked = gateway.client.post("/v1/completions", json={"model": EMPTY, "prompt": "A"})
        assert reason in error_of(asked, 503)["message"]
        gateway.client.post("/remove_worker", params=query, headers=gateway.admin).raise_for_status()
        assert post(model_id=EMPTY).status_code == 202
        until(lambda: all_say(gateway, f"/health?model={EMPTY}", "ok"))
        assert [text(gateway, EMPTY) for _ in range(4)] == ["BCD"] * 4
        assert post(model_id=SECOND).status_code == 202  # of another vocabulary, and known by its address in two pools
        until(
            lambda: (
                {one["state"] for one in workers(gateway, model=SECOND) if one["address"] == late.address}
                == {"refused"}
            )
        )
        ambiguous = gateway.client.delete(f"/workers/{late.address}", headers=gateway.admin)
        assert "several models (org/second, third)" in error_of(ambiguous, 400)["message"]
        for model in (SECOND, EMPTY):
            query = {"model": model, "drain": "false"}
            assert (
                gateway.client.delete(f"/workers/{late.address}", params=query, headers=gateway.admin).status_code
                == 202
            )
        until(lambda: late.address not in [one["address"] for one in workers(gateway)])
        assert (
            "its pool is empty"
            in error_of(gateway.client.post("/v1/completions", json={"model": EMPTY, "prompt": "A"}), 503)["message"]
        )
        wrong = {"url": drafts[FIRST].address, "model": SECOND, "worker_type": "draft"}
        gateway.client.post("/add_worker", params=wrong, headers=gateway.admin).raise_for_status()
        reason = "hash v1, not v2"
        until(lambda: any(reason in (one["reason"] or "") for one in workers(gateway, model=SECOND)))
        query = {"url": drafts[FIRST].address, "model": SECOND}
        gateway.client.post("/remove_worker", params=query, headers=gateway.admin).raise_for_status()
        until(lambda: len(workers(gateway)) == 4)
    finally:
        late.stop()


def test_the_loss_of_one_model_leaves_the_other_untouched(gateway, targets):
    streams = {model: Stream(gateway, model=model) for model in (FIRST, SECOND)}
    for stream in streams.values():
        started(stream)
    targets[SECOND].stop()
    until(lambda: all_say(gateway, f"/health/ready?model={SECOND}", "unavailable"))
    assert text(gateway, FIRST) == "BCD"
    assert gateway.client.get("/health/ready").json()["models"][SECOND] == "unavailable"
    assert streams[FIRST].whole()
    targets[SECOND].facts["fingerprint"] = "/w"  # it loads the weights of the last update
    targets[SECOND].start()
    targets[SECOND].engine.calls = []
    streams[SECOND].join(40)
    assert len(streams[SECOND].tokens) == 200
    assert {(b - a) % 300 for a, b in zip(streams[SECOND].tokens, streams[SECOND].tokens[1:], strict=False)} == {2}


def test_aborts_find_requests_of_all_models(gateway):
    for model, body in ((SECOND, {"rid": "long"}), (FIRST, {"abort_all": True, "model": FIRST})):
        stream = Stream(gateway, model=model, request_id="long")
        started(stream)
        aborted = gateway.client.post("/abort_request", json=body, headers=gateway.admin).json()
        assert aborted["aborted_requests"] == 1
        stream.join(40)
        assert stream.reason == "abort"


def test_the_file_is_read_again_at_sighup(gateway, folder, targets):
    file = folder / "models.toml"
    before = file.read_text()

    def read_again(content):
        file.write_text(content)
        gateway.process.send_signal(signal.SIGHUP)

    def names():
        """Of several new connections, which reach all workers."""
        answers = [httpx.get(gateway.url + "/v1/models").json()["data"] for _ in range(8)]
        return {tuple(one["id"] for one in answer) for answer in answers}

    try:
        read_again(before.replace('"org/third"', "3"))
        until(lambda: "the models stay as they were" in gateway.log.read_text())
        assert "[third] model-path" in gateway.log.read_text()
        assert names() == {(FIRST, "one", SECOND, EMPTY)}
        stream = Stream(gateway, model=SECOND, max_tokens=100)
        started(stream)
        first = before[: before.index(f'["{SECOND}"]')].replace('"one"', '"uno"')
        joins = f'[fourth]\ntarget = "{targets[FIRST].address}"\n'
        read_again(f'{first}[{EMPTY}]\ntarget = "{targets[FIRST].address}"\n{joins}')
        assert text(gateway, FIRST) == "BCD"  # as it was, until the changed one is up
        until(lambda: names() == {(FIRST, "uno", EMPTY, "fourth")})
        for model in (EMPTY, "fourth"):
            until(lambda model=model: all_say(gateway, f"/health?model={model}", "ok"))
        assert [text(gateway, model) for model in (FIRST, EMPTY, "fourth") for _ in range(3)] == ["BCD"] * 9
        assert error_of(gateway.client.post("/v1/completions", json={"model": SECOND, "prompt": "A"}), 404)
        stream.join(40)
        assert len(stream.tokens) == 100  # it ended where it was
    finally:
        read_again(before)
        until(lambda: names() == {(FIRST, "one", SECOND, EMPTY)})
        until(lambda: all_say(gateway, f"/health?model={SECOND}", "ok"))
        until(lambda: all_say(gateway, f"/health?model={EMPTY}", "unavailable"))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
async def test_the_page_offers_the_models(gateway, tmp_path):
    async with Browser(CHROMIUM, tmp_path) as browser:
        await browser.open(f"{gateway.url}/")
        await browser.wait("document.getElementById('choice').hidden === false")
        options = "[...document.getElementById('models').options].map(one => one.value)"
        assert await browser.run(options) == [FIRST, SECOND, EMPTY]
        choose = "document.getElementById('models').value = '{}';"
        choose += "document.getElementById('models').dispatchEvent(new Event('change'));"
        health = "document.getElementById('health').textContent"
        await browser.run(choose.format(EMPTY))
        await browser.wait(f"{health} === 'not ready'")
        await browser.run(choose.format(SECOND))
        await browser.wait(f"{health} === ''")
        await browser.run(
            "document.getElementById('mode').value = 'off'; document.getElementById('tokens').value = 5;"
            "document.getElementById('prompt').value = 'A'; document.getElementById('ask').requestSubmit()"
        )
        await browser.wait("document.querySelectorAll('.answer[data-done]').length === 1")
        assert await browser.run("document.querySelector('.answer .error') === null")
        assert browser.complaints == []
