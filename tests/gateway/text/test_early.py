"""A tokenizer that is built before the handshake is used only for the same files."""

import pytest

from gateway.text import early
from outrider.errors import ConfigError
from tests.support.gateway.engines import tokenizer_files


@pytest.fixture
def built(monkeypatch):
    """The files of the tokenizers that were built."""
    found, real = [], early.ModelTokenizer

    def build(files):
        found.append(files)
        return real(files)

    monkeypatch.setattr(early, "ModelTokenizer", build)
    return found


async def test_equal_files_are_read_once(built):
    tokenizers = early.EarlyTokenizer()
    tokenizers.begin(tokenizer_files())
    tokenizers.begin(tokenizer_files())
    tokenizer = await tokenizers.of(tokenizer_files())
    assert tokenizer.encode("a")
    assert len(built) == 1


async def test_the_files_of_the_handshake_count(built):
    tokenizers = early.EarlyTokenizer()
    tokenizers.begin({"tokenizer.json": b"{}"})  # of a target that was replaced
    assert (await tokenizers.of(tokenizer_files())).encode("a")
    tokenizers.begin({"tokenizer.json": b"{}"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await tokenizers.of({"tokenizer.json": b"{}"})
