"""Grammars: JSON schemas, GBNF and regular expressions compiled for llguidance, and the matchers of sessions.

`matcher` is the entry. `compile_queue` compiles in turns; `sandbox` translates in another process (`sandbox_process`).
The other modules rewrite grammars for llguidance (`source`, `gbnf`, `closed_objects`, `string_formats`), or refuse
what it cannot take (`enforceable`, `numbers`).
"""
