"""Grammars: schemas and GBNF compiled for llguidance, and the matchers that constrain sessions."""
