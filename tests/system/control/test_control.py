"""Control of running targets over the gateway's REST API, as trainers use it."""

import base64
import concurrent.futures
import pickle
import re
import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from outrider.client import Client
from outrider.errors import ConfigError
from services.target.process.control import Control
from tests.support.gateway.services import free_port, until
from tests.support.system.controlled import KEY, PROMPTS, pickled, stream
from tests.support.system.trainer import GROUP, Trainer
from tests.support.tiny import write_model


def test_weights_from_disk_and_from_tensors(system, folders, expected):
    running = system(folders[0])
    assert running.texts(temperature=1, seed=3) == expected[0]
    before = running.ask("x")
    assert before["metadata"] == {"weight_version": "default"}
    flushed = []
    running.draft.engine.flush = lambda **how: flushed.append(how)
    response = running.post("/update_weights_from_disk", json={"model_path": str(folders[1]), "weight_version": "7"})
    assert response["success"]
    assert running.texts(temperature=1, seed=3) == expected[1]
    assert running.version() == "7"
    labelled = running.post("/update_weight_version", json={"new_version": "7b", "abort_all_requests": False})
    assert (labelled["new_version"], running.version()) == ("7b", "7b")
    assert running.texts(temperature=1, seed=3) == expected[1]
    assert running.ask("x")["metadata"] == {"weight_version": "7b"}
    running.post("/update_weight_version", json={"new_version": "7"})
    with Client(f"127.0.0.1:{running.gateway.grpc_port}") as client:
        assert client.complete("x", max_tokens=2).weight_version == "7"
    after = running.ask("x")
    assert after["metadata"] == {"weight_version": "7"}
    assert after["system_fingerprint"] != before["system_fingerprint"]

    content = save(load_file(folders[0] / "model.safetensors"))
    assert len(content) > 20 * 10_000, "far beyond what other bodies may have"
    kind = {"content-type": "application/octet-stream"}
    response = running.post("/update_weights_from_tensor?weight_version=8", content=content, headers=kind)
    assert (response["weight_version"], response["num_paused_requests"]) == ("8", 0)
    assert flushed == 2 * [{"only_fed": True}]
    assert running.texts(temperature=1, seed=3) == expected[0]
    info = running.gateway.client.get("/get_model_info").json()
    assert (info["weight_version"], info["is_generation"]) == ("8", True)
    body = {"serialized_named_tensors": [pickled(load_file(folders[1] / "model.safetensors"))], "weight_version": "9"}
    assert running.post("/update_weights_from_tensor", json=body | {"load_format": None})["weight_version"] == "9"
    assert running.texts(temperature=1, seed=3) == expected[1]
    running.post("/update_weights_from_tensor", content=content, headers=kind)
    # The drafter has seen this text; on a busy machine its proposals may be late at first. One request at a time,
    # because several requests do not try speculation at once.
    until(lambda: running.ask(PROMPTS[0]) and running.gateway.metric("outrider_accepted_draft_tokens_total") > 0, 60)
    running.post("/update_weights_from_disk", json={"model_path": str(folders[1]), "flush_cache": False})
    assert len(flushed) == 4, "what is cached is to be kept"


def test_a_bad_update_is_refused_and_changes_nothing(shared, folders, expected, tmp_path):
    running = shared
    other = write_model(tmp_path / "other", seed=2, num_hidden_layers=2)
    error = running.post("/update_weights_from_disk", 400, json={"model_path": str(other)})["error"]
    assert "num_hidden_layers" in error["message"]
    part = save({"model.norm.weight": load_file(folders[1] / "model.safetensors")["model.norm.weight"][:7]})
    kind = {"content-type": "application/octet-stream"}
    error = running.post("/update_weights_from_tensor", 400, content=part, headers=kind)["error"]
    assert "[7]" in error["message"]
    part = save({"model.norm.weight": torch.full((48,), float("nan"))})
    error = running.post("/update_weights_from_tensor", 400, content=part, headers=kind)["error"]
    assert "model.norm.weight has NaN" in error["message"]
    kind = {"content-type": "text/plain"}
    error = running.post("/update_weights_from_tensor", 415, content=part, headers=kind)["error"]
    assert "safetensors file" in error["message"]
    body = {"serialized_named_tensors": [pickled({"model.norm.weight": torch.zeros(48), "other": torch.zeros(4)})]}
    for changes, words in (
        ({}, "no tensors of these names: other"),
        ({"serialized_named_tensors": [pickled({"model.norm.weight": torch.full((48,), float("inf"))})]}, "has inf"),
        ({"serialized_named_tensors": []}, "serialized_named_tensors"),
        ({"serialized_named_tensors": ["?"]}, "base64"),
        ({"serialized_named_tensors": [base64.b64encode(pickle.dumps(print)).decode()]}, "names builtins.print"),
        ({"serialized_named_tensors": ["A" * 6_000_000]}, "fewer tensors"),
        ({"load_format": "my.loader"}, "my.loader"),
    ):
        assert words in running.post("/update_weights_from_tensor", 400, json=body | changes)["error"]["message"]
    running.post("/update_weights_from_disk", 400, json={"model_path": str(folders[1]), "load_format": "flattened"})
    running.post("/update_weights_from_disk", 400, json={})
    assert running.version() == "default"
    assert running.texts(temperature=1, seed=3) == expected[0]


def test_a_trainer_that_dies_in_its_upload_leaves_the_old_weights(shared, folders, expected):
    """Until its connection is seen to end, other trainers get an error that says to wait."""
    running, kind = shared, {"content-type": "application/octet-stream"}
    norm = "model.norm.weight"
    content = save(load_file(folders[1] / "model.safetensors"))
    same = save({norm: load_file(folders[0] / "model.safetensors")[norm]})

    def dying():
        yield content[: len(content) // 2]
        until(lambda: "another update" in running.post("/update_weights_from_tensor", None, content=same, headers=kind)
              .get("error", {}).get("message", ""))  # fmt: skip
        raise ConnectionError

    with pytest.raises(ConnectionError):
        running.post("/update_weights_from_tensor", content=dying(), headers=kind)
    until(lambda: running.post("/update_weights_from_tensor", None, content=same, headers=kind).get("success"))
    assert running.texts(temperature=1, seed=3) == expected[0]
    assert running.version() == "default"


def test_weights_over_a_trainers_process_group(system, folders, expected, tmp_path):
    """Weights that do not fit, and a trainer that dies, leave the old ones."""
    running = system(folders[0])
    tensors = load_file(folders[1] / "model.safetensors")
    names, port = sorted(tensors), free_port()
    parts = [names[::2], names[1::2]]
    save_file(tensors | {"spoilt": torch.full((48,), float("nan"))}, tmp_path / "model.safetensors")
    trainer = Trainer(port, tmp_path)

    def announced(names, **changes):
        return {
            "names": names, "dtypes": [str(tensors[name].dtype) for name in names], "group_name": GROUP,
            "shapes": [list(tensors[name].shape) for name in names],
        } | changes  # fmt: skip

    def update(status, names, end=None, **changes):
        body = announced(names, **changes)
        answer = pool.submit(running.post, "/update_weights_from_distributed", status, json=body)
        end() if end else trainer.broadcast(names, flat="load_format" in changes)
        return answer.result(60)

    join = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "group_name": GROUP}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        error = running.post("/init_weights_update_group", 400, json=join | {"rank_offset": 2, "backend": "gloo"})
        assert "1 ranks from 2 on" in error["error"]["message"]
        error = running.post("/init_weights_update_group", 400, json=join | {"backend": "nccl"})["error"]
        assert "backend gloo, not nccl" in error["message"]
        assert running.post("/init_weights_update_group", json=join | {"backend": "gloo"})["success"]
        assert update(200, parts[0])["success"]
        assert running.texts(temperature=1, seed=3) != expected[0]
        body = update(200, parts[1], load_format="flattened_bucket", weight_version="two")
        assert (body["weight_version"], body["unused_targets"]) == ("two", [])
        assert running.texts(temperature=1, seed=3) == expected[1]
        norm = "model.norm.weight"
        assert "[24, 2]" in update(400, [norm], shapes=[[24, 2]])["error"]["message"]
        assert "has NaN" in update(400, [norm], lambda: trainer.broadcast(["spoilt"]))["error"]["message"]

        def half():
            trainer.broadcast([norm])
            time.sleep(0.3)
            trainer.kill()

        assert "did not arrive" in update(400, [norm, parts[1][0]], half)["error"]["message"]
        assert "no process group" in update(400, [norm], int)["error"]["message"]
        assert running.texts(temperature=1, seed=3) == expected[1]
    assert "no process group" in running.post("/destroy_weights_update_group", 400, json=join)["error"]["message"]


def test_an_update_of_several_parts_is_never_served_in_part(system, folders, expected):
    """As SGLang's clients send it: requests wait from its beginning to its end, and go on with all of it."""
    running = system(folders[0])
    tensors = load_file(folders[1] / "model.safetensors")
    names = sorted(tensors)
    halves = [{name: tensors[name] for name in some} for some in (names[::2], names[1::2])]
    assert "no update of the weights is open" in running.post("/end_weight_update", 400)["error"]["message"]
    assert "target" in running.post("/begin_weight_update", 400, json={"selector": "draft"})["error"]["message"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        future, _ = stream(running, pool, temperature=1, seed=3)
        running.post("/begin_weight_update", json={"selector": "all"})
        assert running.gateway.client.get("/get_weight_version").json()["update_open"]
        waiting = pool.submit(running.ask, PROMPTS[1], temperature=1, seed=3)
        running.pause(0)
        for number, half in enumerate(halves):
            body = {"serialized_named_tensors": [pickled(half)], "weight_version": str(number)}
            running.post("/update_weights_from_tensor", json=body)
            assert not concurrent.futures.wait([future, waiting], timeout=0.3).done
        assert "open already" in running.post("/begin_weight_update", 400)["error"]["message"]
        running.post("/end_weight_update")
        assert waiting.result(30)["choices"][0]["token_ids"] == expected[1][1]
        assert future.result(30)[1] == "length"
    assert running.gateway.client.get("/get_weight_version").json()["update_open"] is False


def test_only_the_admin_key_controls(shared):
    running = shared
    for route in (
        "update_weights_from_disk",
        "pause_generation",
        "flush_cache",
        "abort_request",
        "continue_generation",
    ):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = running.gateway.client.post(f"/{route}", headers=headers, json={"abort_all": True})
            assert answer.status_code == 401
    assert KEY not in running.gateway.client.get("/server_info").text
    assert running.version() == "default"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_holds_requests_and_changes_no_token(shared, mode):
    running = shared
    whole = running.ask(PROMPTS[1], max_tokens=450, temperature=1, seed=3)["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        future, begun = stream(running, pool, temperature=1, seed=3)
        running.post("/pause_generation", json={"mode": mode})
        waiting = pool.submit(running.ask, "x", max_tokens=3)
        held = -1
        while held != len(begun):  # what was under way still arrives
            held = len(begun)
            time.sleep(0.5)
        assert not concurrent.futures.wait([future, waiting], timeout=0).done
        if mode == "retract":
            assert running.post("/flush_cache")["success"]
        else:
            assert "under way" in running.post("/flush_cache", 400)["error"]["message"]
        running.pause(0)
        running.post("/continue_generation")
        assert future.result(30) == (whole, "length")
        assert len(waiting.result(30)["choices"][0]["token_ids"]) == 3


def test_released_memory_comes_back_and_changes_no_token(shared):
    running, pools = shared, shared.targets[0].engine.cache.keys
    whole = running.ask(PROMPTS[1], max_tokens=450, temperature=1, seed=3)["choices"][0]["token_ids"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, begun = stream(running, pool, temperature=1, seed=3)
        error = running.post("/release_memory_occupation", 400, json={"tags": ["weights"]})["error"]
        assert "weights stay in memory" in error["message"]
        assert any(keys.any() for keys in pools)
        body = running.post("/release_memory_occupation", json={})
        assert body["released_bytes"] > 0.9 * sum(keys.nbytes for keys in pools)
        assert not any(keys[2:-2].any() for keys in pools)
        running.post("/pause_generation", json={"mode": "retract"})
        running.post("/continue_generation")
        held = -1
        while held != len(begun):
            held = len(begun)
            time.sleep(0.3)
        assert not future.done()
        running.pause(0)
        running.post("/resume_memory_occupation", json={"tags": ["kv_cache", "weights"]})
        assert future.result(30) == (whole, "length")


def test_a_flush_is_refused_while_sessions_run(shared):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, _ = stream(shared, pool, temperature=1, seed=4)
        assert "under way" in shared.post("/flush_cache?timeout=0.3", 400)["error"]["message"]
        shared.pause(0)
        assert shared.post("/flush_cache?timeout=30")["success"]
        assert future.result(5)[1] == "length"
    assert "timeout" in shared.post("/flush_cache?timeout=-1", 400)["error"]["message"]


def test_a_flush_reaches_the_draft(shared):
    running = shared
    offered = re.compile(r'outrider_drafter_proposed_tokens{address="unix:[^"]*",drafter="NGRAM"} [1-9]')
    # a text so short may be over before the draft has read its beginning
    until(
        lambda: (
            running.ask("a b a b a b a b", max_tokens=40)
            and offered.search(running.gateway.client.get("/metrics").text)
        )
    )
    ngrams = running.draft.engine.drafter.ngrams
    until(lambda: len(ngrams) > 0)  # the draft hears of the last tokens when the client does, or later
    until(lambda: running.draft.engine.load().running_sessions == 0)
    assert running.post("/flush_cache")["success"]
    assert len(ngrams) == 0
    running.ask(PROMPTS[0], max_tokens=5)
    until(lambda: len(ngrams) > 0)


@pytest.mark.parametrize("route", ["/pause_generation", "/abort_request", "/update_weights_from_disk"])
def test_requests_can_be_aborted(shared, folders, route):
    running = shared
    body = {"abort_all": True, "model_path": str(folders[0]), "abort_all_requests": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, _ = stream(running, pool, temperature=0)
        running.post(route, json=body)
        running.pause(0)
        tokens, reason = future.result(30)
        assert reason == "abort"
        assert 0 < len(tokens) < 450
    running.post("/continue_generation")
    assert len(running.ask("x", max_tokens=3)["choices"][0]["token_ids"]) == 3
    until(lambda: running.draft.engine.load().running_sessions == 0)


def test_requests_go_on_with_new_weights(system, folders):
    running = system(folders[0])
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, _ = stream(running, pool, temperature=0)
        response = running.post("/update_weights_from_disk", json={"model_path": str(folders[1])})
        running.pause(0)
        assert response["num_paused_requests"] == 1
        tokens, reason = future.result(30)
        assert (len(tokens), reason) == (450, "length")


def test_a_target_that_restarts_loads_the_weights_of_the_last_update(system, folders, expected, tmp_path):
    """Where their folder is gone, requests end at once, and the pool reports what it waits for."""
    running = system(folders[0])
    target, client = running.targets[0], running.gateway.client
    step = shutil.copytree(folders[1], tmp_path / "step 9")
    running.post("/update_weights_from_disk", json={"model_path": str(step), "weight_version": "9"})
    target.stop()
    target.start()
    until(running.gateway.healthy)
    assert running.texts(temperature=1, seed=3) == expected[1]
    assert running.ask("x")["metadata"] == {"weight_version": "9"}
    shutil.rmtree(step)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future, _ = stream(running, pool)
        target.stop()
        target.start()
        began = time.monotonic()
        until(future.done, 30)
        assert time.monotonic() - began < 20
        with pytest.raises(KeyError, match="choices"):  # an event with the error
            future.result()
    health = client.get("/health")
    state = health.json()
    assert (health.status_code, state["awaited_weights"]) == (503, ["9"])
    assert state["targets"][0]["state"] == "awaiting_weights"
    assert str(step) not in health.text
    assert f"cannot be loaded from {step}" in running.gateway.log.read_text()
    assert running.gateway.metric("outrider_awaited_weights", weight_version="9") == 1
    found = client.get("/get_weight_version").json()
    assert found == {"weight_version": "9", "update_open": False, "awaiting_targets": [target.address]}
    refused = client.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, '"9"' in refused.json()["error"]["message"]) == (503, True)
    answer = running.post("/update_weights_from_disk", json={"model_path": str(folders[1]), "weight_version": "9"})
    assert answer["unused_targets"] == []
    assert client.get("/health/ready").status_code == 200
    running.pause(0)
    assert running.texts(temperature=1, seed=3) == expected[1]
    assert "awaited_weights" not in client.get("/health").json()


@pytest.mark.parametrize("targets", [1, 2])
def test_a_target_that_starts_anew_between_two_parts_of_an_update_is_not_used(system, folders, expected, targets):
    running = system(folders[0], targets=targets)
    tensors = load_file(folders[1] / "model.safetensors")
    names = sorted(tensors)
    parts = [save({name: tensors[name] for name in part}) for part in (names[::2], names[1::2])]
    messages = []

    def send(part):
        kind = {"content-type": "application/octet-stream"}
        messages.append(running.post("/update_weights_from_tensor", content=part, headers=kind)["message"])

    send(parts[0])
    running.targets[0].stop()
    running.targets[0].start()
    until(lambda: "fingerprint" in running.gateway.log.read_text())
    send(parts[1])
    if targets > 1:
        assert running.texts(temperature=1, seed=3) == expected[1]
    send(parts[0])
    assert [f"1 of {targets} targets lack earlier weights" in message for message in messages] == [False, True, False]
    if targets > 1:
        running.targets[1].stop()
    assert running.texts(temperature=1, seed=3) == expected[1]


def test_a_target_with_old_weights_is_not_used(system, folders, expected, monkeypatch):
    """One of two targets cannot take the new weights; later it restarts, and loads them before it is used."""
    running = system(folders[0], targets=2)
    body = {"model_path": str(folders[1]), "weight_version": "2"}
    read = Control.read_folder

    def read_by_others(control, path, condition=None):
        if control._engine is running.targets[1].engine:
            raise ConfigError("it is not on this machine")
        return read(control, path, condition)

    with monkeypatch.context() as patch:
        patch.setattr(Control, "read_folder", read_by_others)
        error = running.post("/update_weights_from_disk", 400, json=body)["error"]
    assert "it is not on this machine; 1 of 2 targets have the new weights" in error["message"]
    for _ in range(3):
        assert running.texts(temperature=1, seed=3) == expected[1]
    running.post("/update_weights_from_disk", json=body)
    targets = running.gateway.client.get("/server_info").json()["targets"]
    assert [target["weight_version"] for target in targets] == ["2", "2"]
    assert running.texts(temperature=1, seed=3) == expected[1]
    running.targets[1].stop()
    running.targets[1].start()
    until(lambda: all(one["up"] for one in running.gateway.client.get("/server_info").json()["targets"]))
    running.targets[0].stop()
    assert running.texts(temperature=1, seed=3) == expected[1]
