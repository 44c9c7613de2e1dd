"""litellm: as a vLLM server, as an OpenAI one, and its own classes of errors."""

import litellm
from checks import MESSAGES, URL, check

BASE = {"api_base": f"{URL}/v1", "api_key": "none", "max_tokens": 16, "temperature": 0, "num_retries": 0}


@check("chat as hosted_vllm and as openai")
def _():
    texts = {
        litellm.completion(model=f"{kind}/default", messages=MESSAGES, **BASE).choices[0].message.content
        for kind in ("hosted_vllm", "openai")
    }
    (text,) = texts
    return repr(text)


@check("a stream with usage")
def _():
    options = {"include_usage": True}
    chunks = list(
        litellm.completion(model="hosted_vllm/default", messages=MESSAGES, stream=True, stream_options=options, **BASE)
    )
    usage = next(chunk.usage for chunk in reversed(chunks) if getattr(chunk, "usage", None))
    return f"{usage.completion_tokens} tokens"


@check("text completions")
def _():
    answer = litellm.text_completion(model="text-completion-openai/default", prompt="One, two,", **BASE)
    return repr(answer.choices[0].text)


@check("error classes: NotFoundError, BadRequestError")
def _():
    for model, options, kind in (
        ("hosted_vllm/other", {}, litellm.NotFoundError),
        ("hosted_vllm/default", {"top_p": 7}, litellm.BadRequestError),
    ):
        try:
            litellm.completion(model=model, messages=MESSAGES, **{**BASE, **options})
        except kind:
            continue
        raise AssertionError(f"{model} {options} was taken")
