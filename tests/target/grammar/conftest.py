"""A target whose vocabulary grammars can spell, and its tokenizer."""

import pytest
from tokenizers import Tokenizer

from tests.support.target.driving import load_model
from tests.support.tiny import write_model, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(write_model(tmp_path_factory.mktemp("llama"), seed=3))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
