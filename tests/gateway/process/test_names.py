"""The names of a model: what requests may call it, and what answers do."""

import json

import pytest

from outrider.client import Client
from outrider.errors import ModelNotFound
from tests.support.gateway.services import Gateway


def test_the_served_name_can_be_chosen(folder, target):
    gateway = Gateway(folder, [target.address], served_model_name="my/model")
    try:
        gateway.wait()
        assert gateway.complete("A", model="my/model")["model"] == "my/model"
        assert gateway.client.get("/v1/models/my/model").json()["id"] == "my/model"
        assert gateway.client.post("/v1/completions", json={"model": "counting", "prompt": "A"}).status_code == 404
    finally:
        assert gateway.stop() == 0


BODIES = {
    "/v1/completions": {"prompt": "A", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1},
    "/v1/responses": {"input": "A", "max_output_tokens": 1},
}


def names_in(gateway, route, model):
    """The names of the model in a whole answer and in the events of a stream; the status if there is none."""
    body = BODIES[route] | {"model": model}
    response = gateway.client.post(route, json=body)
    if response.status_code != 200:
        return response.status_code
    lines = gateway.client.post(route, json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = {(event.get("response") or event).get("model") for event in events}
    return {response.json()["model"], *streamed} - {None}


def native(gateway, model):
    with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
        return list(client.generate("A", model=model, max_tokens=1))


def test_a_model_may_have_several_names(folder, target):
    gateway = Gateway(folder, [target.address], served_model_name=["first", "org/second"])
    try:
        gateway.wait()
        for route in BODIES:
            assert names_in(gateway, route, "first") == {"first"}
            assert names_in(gateway, route, "org/second") == {"org/second"}
            assert names_in(gateway, route, "default") == {"first"}
            assert names_in(gateway, route, "third") == 404
        listed = [model["id"] for model in gateway.client.get("/v1/models").json()["data"]]
        assert listed == ["first", "org/second"]
        assert gateway.client.get("/v1/models/org/second").json()["id"] == "org/second"
        assert gateway.client.get("/v1/models/third").status_code == 404
        assert native(gateway, "org/second")
        assert gateway.client.post("/tokenize", json={"prompt": "A", "model": "org/second"}).status_code == 200
        with pytest.raises(
            ModelNotFound, match="`first` or `org/second`, or start the gateway with --accept-any-model"
        ):
            native(gateway, "third")
    finally:
        assert gateway.stop() == 0


def test_any_model_is_answered_if_a_flag_says_so(folder, target):
    gateway = Gateway(folder, [target.address], served_model_name="first", accept_any_model=True)
    try:
        gateway.wait()
        for route in BODIES:
            assert names_in(gateway, route, "meta-llama/Llama-2-7b-chat-hf") == {"meta-llama/Llama-2-7b-chat-hf"}
            assert names_in(gateway, route, "default") == {"first"}
        assert native(gateway, "gpt-7")
        assert gateway.client.post("/tokenize", json={"prompt": "A", "model": "gpt-7"}).status_code == 200
        # It is answered, but not listed, and no name of a request becomes a label of a metric.
        assert [model["id"] for model in gateway.client.get("/v1/models").json()["data"]] == ["first"]
        assert gateway.client.get("/v1/models/gpt-7").status_code == 404
        assert "gpt-7" not in gateway.client.get("/metrics").text
    finally:
        assert gateway.stop() == 0
