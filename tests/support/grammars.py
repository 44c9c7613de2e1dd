"""Grammars of each kind, and sampling parameters for texts that follow them."""

import json

from outrider.serving.messages import Grammar, GrammarKind
from outrider.speculation.sampling import SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-f]{1,8}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["red", "reed", "green"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
REGEX = Grammar(GrammarKind.REGEX, "(ab|ac|b[xyz]{2,4})+d{3}[0-9]{2,30}")
SAMPLED = SamplingParams(1.0, seed=11, top_k=40)
