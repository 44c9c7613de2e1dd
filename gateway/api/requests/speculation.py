"""The field `speculation` of all request bodies: whether, how far and by which draft sources a request is speculated.

It never changes the text.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from gateway.api.requests.fields import Count, Flag, Items, few
from outrider.speculation.draft_source import ALL_SOURCES, SOURCES_BY_LABEL

_KNOWN = ", ".join(f'"{label}"' for label in SOURCES_BY_LABEL)


def _known(labels: list[str]) -> list[str]:
    for label in labels:
        if label not in SOURCES_BY_LABEL:
            raise PydanticCustomError("source", f'"{label}" is no draft source; name some of {_KNOWN}')
    return labels


class SpeculationBody(BaseModel):
    """Speculation for a request, which does not change its text.

    max_draft_tokens: draft tokens that a step verifies at most. sources: draft sources that may draft; by default all
    report: return statistics of every step.
    """

    model_config = ConfigDict(extra="forbid")

    enabled: Flag = True
    max_draft_tokens: Count | None = Field(None, ge=0, lt=2**31)
    sources: Annotated[Items[str], Field(max_length=16), AfterValidator(_known)] | None = None
    report: Flag = False


def _meant(value: Any) -> Any:
    """Refuses what is neither of the words nor an object, with all that may be sent."""
    if value in ("off", "auto") or isinstance(value, dict | SpeculationBody):
        return value
    options = ", ".join(SpeculationBody.model_fields)
    raise PydanticCustomError(
        "speculation", f'Input should be "off", "auto", or an object with some of {options}; "off" decodes plainly'
    )


SpeculationField = Annotated[Annotated[SpeculationBody, few(16)] | Literal["off", "auto"], BeforeValidator(_meant)]


def speculation_of(field: SpeculationBody | str | None) -> dict[str, Any]:
    """The fields of a GenerationRequest: the most draft tokens of a step, and the sources that may draft."""
    if not isinstance(field, SpeculationBody):
        return {"max_draft_tokens": 0 if field == "off" else None}
    none = not field.enabled or field.sources == []
    sources = ALL_SOURCES if not field.sources else frozenset(SOURCES_BY_LABEL[label] for label in field.sources)
    return {"max_draft_tokens": 0 if none else field.max_draft_tokens, "draft_sources": sources}


def reports_steps(field: SpeculationBody | str | None) -> bool:
    """True if the answer has statistics of every step."""
    return isinstance(field, SpeculationBody) and field.report
