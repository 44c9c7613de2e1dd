"""The command `llm`."""

import json
import pathlib

from checks import URL, check, output_of

folder = pathlib.Path("home").absolute()
folder.mkdir(exist_ok=True)
model = {"model_id": "outrider", "model_name": "default", "api_base": f"{URL}/v1", "supports_schema": True}
(folder / "extra-openai-models.yaml").write_text(json.dumps([model]))  # YAML, too
HOME = {"LLM_USER_PATH": str(folder), "OPENAI_API_KEY": "none"}
LLM = ("llm", "prompt", "-m", "outrider", "-o", "temperature", "0")


@check("a prompt, streamed and whole")
def _():
    asked = (*LLM, "-o", "max_tokens", "12", "Name a city.")
    streamed, whole = output_of(*asked, **HOME), output_of(*asked, "--no-stream", **HOME)
    assert streamed == whole
    return repr(streamed)


@check("an answer that follows a schema")
def _():
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}},
              "required": ["age"], "additionalProperties": False}  # fmt: skip
    text = output_of(*LLM, "--schema", json.dumps(schema), "How old is he?", **HOME)
    assert 1 <= json.loads(text)["age"] <= 99
    return text
