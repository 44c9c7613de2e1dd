"""The `openai` SDK."""

import openai
from checks import MESSAGES, URL, check
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
CHAT = {"model": "default", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}


@check("models.list and models.retrieve")
def _():
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    return model.id


@check("chat, whole and streamed, is the same text")
def _():
    whole = client.chat.completions.create(**CHAT)
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    return repr(text)


@check("the streaming helper")
def _():
    with client.chat.completions.stream(**CHAT, stop=",") as stream:
        kinds = {event.type for event in stream}
        return f"{stream.get_final_completion().choices[0].finish_reason}; {', '.join(sorted(kinds))}"


@check("a seed gives the same text again, n others")
def _():
    asked = {**CHAT, "temperature": 1, "seed": 5, "n": 2}
    one, two = ([c.message.content for c in client.chat.completions.create(**asked).choices] for _ in range(2))
    assert one == two
    assert len(set(one)) == 2


@check("log-probabilities")
def _():
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in logprobs)
    return f"{len(logprobs)} tokens"


@check("completions of token ids, with echo")
def _():
    answer = client.completions.create(model="default", prompt=[[5, 6, 7], [8, 9]], max_tokens=3, echo=True)
    assert len(answer.choices) == 2


@check("parse() into a Pydantic model")
def _():
    answer = client.chat.completions.parse(**{**CHAT, "max_tokens": 200}, response_format=Place)
    return repr(answer.choices[0].message.parsed)


@check("a tool that must be called")
def _():
    tool = openai.pydantic_function_tool(Place)
    answer = client.chat.completions.create(**{**CHAT, "max_tokens": 200}, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    return repr(Place.model_validate_json(call.function.arguments))


@check("responses.create")
def _():
    return repr(client.responses.create(model="default", input="Hello", max_output_tokens=8).output_text)


@check("error classes: NotFoundError, BadRequestError")
def _():
    for wrong, kind in (({"model": "other"}, openai.NotFoundError), ({"temperature": 9}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**{**CHAT, **wrong})
        except kind:
            continue
        raise AssertionError(f"{wrong} was taken")
