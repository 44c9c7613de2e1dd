"""Reads errors and streams in HTTP responses of the gateway."""

import json


def error_of(response, status):
    """The error in a response of this status, in OpenAI's form."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["code"] is None or isinstance(error["code"], str)
    return error


def events(response):
    """The events of a stream up to [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
