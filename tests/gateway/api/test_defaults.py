"""Sampling parameters that requests omit are those of the model, in every API."""

import json
from dataclasses import replace

import pytest

from gateway.orchestration.sampling_defaults import OPENAI, SamplingDefaults, of_model
from outrider.client import Client
from outrider.errors import ConfigError
from outrider.speculation.sampling import SamplingParams
from tests.support.gateway.engines import tokenizer_files
from tests.support.gateway.services import Gateway, Service, Target, refused

MAKERS = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
USUAL = SamplingParams(0.6, 20, 0.9, repetition_penalty=1.05)
OWN = {"temperature": 0.25, "top_p": 0.5, "top_k": -1, "min_p": 0.125, "repetition_penalty": 1.5}
ASKED = SamplingParams(0.25, 0, 0.5, 0.125, repetition_penalty=1.5)
CHAT = [{"role": "user", "content": "A"}]


def files_with(settings):
    return tokenizer_files() | {"generation_config.json": json.dumps(settings).encode()}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    service = Service(Target, f"unix:{tmp_path_factory.mktemp('defaults')}/target", files=files_with(MAKERS)).start()
    yield service
    service.stop()


@pytest.fixture(scope="module", params=["model", "openai"])
def served(request, target, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    gateway = Gateway(folder, [target.address], sampling_defaults=request.param).wait()
    yield gateway, USUAL if request.param == "model" else SamplingParams()
    gateway.stop()


@pytest.mark.parametrize(
    ("route", "body", "inside"),
    [
        ("/v1/completions", {"prompt": "A", "max_tokens": 1}, None),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}, None),
        ("/v1/responses", {"input": "A", "max_output_tokens": 1}, None),
        ("/generate", {"text": "A"}, "sampling_params"),
    ],
)
def test_defaults_in_rest(served, target, route, body, inside):
    gateway, usual = served
    for own, expected in (({}, usual), (OWN, ASKED), ({"top_k": 0}, replace(usual, top_k=0))):
        more = {inside: {"max_new_tokens": 1, **own}} if inside else own
        response = gateway.client.post(route, json=body | more)
        assert response.status_code == 200, response.text
        assert replace(target.engine.seen[-1].sampling, seed=0) == expected
        if route == "/v1/responses":
            returned = response.json()
            assert (returned["temperature"], returned["top_p"]) == (expected.temperature, expected.top_p)


def test_defaults_in_grpc(served, target):
    gateway, usual = served
    with Client(f"127.0.0.1:{gateway.grpc_port}") as client:
        for own, expected in (({}, usual), (OWN | {"top_k": 0}, ASKED)):
            client.complete("A", max_tokens=1, **own)
            assert replace(target.engine.seen[-1].sampling, seed=0) == expected


def test_missing_defaults_are_neutral():
    assert of_model({}) == OPENAI
    assert of_model(files_with({"eos_token_id": 2, "temperature": None})) == OPENAI
    assert of_model(files_with({"temperature": 0.6, "top_k": -1})) == SamplingDefaults(0.6)


@pytest.mark.parametrize(("written", "meant"), [(50.0, 50), (-1.0, 0), (0.0, 0)])
def test_an_integer_default_may_be_written_as_a_float(written, meant):
    returned = of_model(files_with({"top_k": written})).top_k
    assert (returned, type(returned)) == (meant, int)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1}, {"temperature": "0.6"}, {"temperature": True}, {"top_p": -1}, {"top_p": [0.9]},
        {"top_k": "many"}, {"top_k": 50.5}, {"top_k": float("inf")}, {"min_p": {}}, {"repetition_penalty": 99},
    ],
)  # fmt: skip
def test_invalid_defaults_are_refused_at_start_up(wrong, tmp_path):
    with pytest.raises(ConfigError, match=f"generation_config.json: {next(iter(wrong))} must"):
        of_model(files_with(wrong))
    if "top_p" in wrong:
        service = Service(Target, f"unix:{tmp_path}/target", files=files_with(wrong)).start()
        try:
            assert "--sampling-defaults openai" in refused("--target", service.address)
        finally:
            service.stop()
