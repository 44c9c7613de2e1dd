"""Texts of the counting target, as tokens and back."""

from tests.support.gateway.engines import tokenizer

TOKENIZER = tokenizer()
HELLO = [{"role": "user", "content": "hello"}]


def ids(text):
    return TOKENIZER.encode(text).ids


def decoded(tokens):
    return TOKENIZER.decode(tokens)
