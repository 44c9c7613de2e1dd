"""Log-probabilities that the counting target gives."""

from tests.support.gateway.texts import TOKENIZER

CHAT_PROMPT = 2 + len(TOKENIZER.encode("hello").ids)


def values(first, count):
    return [-(first + i) / 4 for i in range(count)]
