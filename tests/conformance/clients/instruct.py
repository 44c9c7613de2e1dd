"""instructor: structured output in several modes."""

import instructor
import openai
from checks import MESSAGES, URL, check
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str = Field(max_length=20)
    country: str = Field(max_length=20)


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):

    @check(f"Mode.{mode.name}")
    def _(mode=mode):
        plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
        client = instructor.from_openai(plain, mode=mode)
        return repr(
            client.chat.completions.create(
                model="default", messages=MESSAGES, response_model=Place, max_retries=1, max_tokens=200, temperature=0
            )
        )
