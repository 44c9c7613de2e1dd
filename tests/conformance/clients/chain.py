"""langchain-openai: chats, streams, structured output, the responses API."""

from checks import URL, check
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


OPTIONS = {"base_url": f"{URL}/v1", "api_key": "none", "model": "default", "temperature": 0, "max_retries": 0}
chat = ChatOpenAI(**OPTIONS, max_tokens=200, stream_usage=True)
ASK = "Name a city and its country."


@check("invoke and stream are the same text")
def _():
    short = chat.bind(max_tokens=16)
    whole = short.invoke(ASK)
    parts = list(short.stream(ASK))
    assert "".join(part.text for part in parts) == whole.text
    assert any(part.usage_metadata for part in parts)
    return repr(whole.text)


for method in ("json_schema", "function_calling", "json_mode"):

    @check(f"with_structured_output by {method}")
    def _(method=method):
        ask = f"{ASK} Answer in JSON with the keys city and country." if method == "json_mode" else ASK
        kind = None if method == "json_mode" else Place
        found = chat.with_structured_output(kind, method=method).invoke(ask)
        assert isinstance(found, Place) or method == "json_mode"
        return repr(found)


@check("the responses API")
def _():
    return repr(ChatOpenAI(**OPTIONS, use_responses_api=True).bind(max_output_tokens=16).invoke(ASK).text)
