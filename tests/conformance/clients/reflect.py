"""`buf curl`, which knows no .proto: reflection of the gRPC port, and calls made from its descriptions."""

import json

from checks import GRPC_ADDRESS, MESSAGES, check, output_of

GRPC_URL = f"http://{GRPC_ADDRESS}"
CURL = ("buf", "curl", "--protocol", "grpc", "--http2-prior-knowledge")
SERVICE = f"{GRPC_URL}/outrider.wire.v1.GatewayService"


def call(method: str, request: object) -> list[dict]:
    """The answers of a call, of which a stream has several, one JSON object after another."""
    text, answers = output_of(*CURL, "--data", json.dumps(request), f"{SERVICE}/{method}").strip(), []
    while text:
        answer, end = json.JSONDecoder().raw_decode(text)
        answers.append(answer)
        text = text[end:].lstrip()
    return answers


@check("services and methods by reflection")
def _():
    services = output_of(*CURL, "--list-services", GRPC_URL).split()
    methods = output_of(*CURL, "--list-methods", GRPC_URL).split()
    assert "outrider.wire.v1.GatewayService" in services
    assert "outrider.wire.v1.GatewayService/Generate" in methods
    return f"{len(methods)} methods of {', '.join(services)}"


@check("GetGatewayInfo")
def _():
    (info,) = call("GetGatewayInfo", {})
    return f"{info['servedModelName']}, drafted for by {', '.join(info['drafters'])}"


@check("Generate, with a conversation as JSON")
def _():
    parts = call("Generate", {"chat": {"messages": MESSAGES}, "maxTokens": 12, "temperature": 0})
    assert parts[-1]["finishReason"] == "FINISH_REASON_LENGTH"
    assert sum(len(part["tokenIds"]) for part in parts) == parts[-1]["completionTokens"] == 12
    return repr("".join(part["text"] for part in parts))


@check("a wrong request is invalid_argument, and an unknown model not_found")
def _():
    for request, code in (({"text": "a", "topP": 7}, "invalid_argument"), ({"text": "a", "model": "b"}, "not_found")):
        try:
            call("Generate", request)
        except RuntimeError as error:
            if code in str(error):
                continue
            raise
        raise AssertionError(f"{request} was taken")


@check("health")
def _():
    (status,) = json.loads(output_of(*CURL, "--data", "{}", f"{GRPC_URL}/grpc.health.v1.Health/Check")).values()
    return status
