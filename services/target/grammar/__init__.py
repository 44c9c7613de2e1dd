"""Grammars: JSON schemas, GBNF and regular expressions compiled for llguidance, and the matchers of sessions.

`matcher` is the entry; the other modules rewrite grammars for llguidance (`gbnf`, `closed_objects`, `string_formats`),
or refuse what it cannot take (`numbers`).
"""
