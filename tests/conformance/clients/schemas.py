"""schemathesis: requests generated from an API description, and checks of the answers against it.

From our own, /openapi.json; and from OpenAI's published one, if OPENAI_DESCRIPTION names the file (openapi.yaml).
"""

import os
import re
from pathlib import Path

import yaml
from checks import MODEL, URL, check, output_of

# Weights, pauses and aborts are for administrators, and would disturb the rest.
CONTROL = "^/(update_weights|pause|continue|abort|flush)"
CHECKS = "status_code_conformance,content_type_conformance,response_schema_conformance,response_headers_conformance"
COMMON = ("--request-timeout", "90", "--seed", "1", "--no-color", "--max-time", "120")
# OpenAI's describes no errors, so any status will do that is not our own fault.
OPENAI_CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance"
OPENAI_PATHS = r"^/(chat/completions|completions|models|models/\{model\})$"
OPENAI_ELSEWHERE = ("listChatCompletions", "deleteModel")  # what is kept and owned at OpenAI


def generated(description: str, *flags: str) -> str:
    """How many requests were made. Raises RuntimeError with what was found."""
    output = output_of("schemathesis", "--config-file", "/dev/null", "run", description, *COMMON, *flags)
    return re.search(r"(\d+) generated", output).group(0)


@check("answers are as described, none of them a 500")
def _():
    phases = ("--phases", "examples,coverage,fuzzing")
    return generated(f"{URL}/openapi.json", "--checks", CHECKS, "-n", "8", *phases, "--exclude-path-regex", CONTROL)


def for_us(description: dict) -> dict:
    """OpenAI's description, for requests that ask for the model that is served here, and for few tokens."""
    schemas, named = description["components"]["schemas"], {"type": "string", "enum": [MODEL]}
    (chat,) = (part for part in schemas["CreateChatCompletionRequest"]["allOf"] if "properties" in part)
    for request in (schemas["CreateCompletionRequest"], chat):
        request["properties"] |= {"model": named, "max_tokens": {"type": "integer", "minimum": 1, "maximum": 8}}
        request["properties"].pop("max_completion_tokens", None)
        request["required"] = [*request["required"], "max_tokens"]
    # An event is taken for its envelope, which no chunk is.
    streamed = description["paths"]["/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    streamed["schema"] = {}
    for parameter in description["paths"]["/models/{model}"]["get"]["parameters"]:
        parameter["schema"] = named
        parameter.pop("example", None)
    return description


if source := os.environ.get("OPENAI_DESCRIPTION"):

    @check("answers are as OpenAI describes its own")
    def _():
        patched = Path("openai.yaml").resolve()
        patched.write_text(yaml.safe_dump(for_us(yaml.safe_load(Path(source).read_text()))))
        left_out = [flag for name in OPENAI_ELSEWHERE for flag in ("--exclude-operation-id", name)]
        flags = ("--url", f"{URL}/v1", "--include-path-regex", OPENAI_PATHS, *left_out, "--checks", OPENAI_CHECKS)
        return generated(str(patched), *flags, "-n", "50")
