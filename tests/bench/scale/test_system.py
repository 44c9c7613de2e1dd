"""Requests to the system under test."""

import contextlib
from types import SimpleNamespace

import pytest

from bench.harness.errors import BenchError
from bench.scale import system


async def test_an_answer_in_a_single_part_is_an_error(monkeypatch):
    class Client(contextlib.AbstractAsyncContextManager):
        def __init__(self, _):
            pass

        async def generate(self, prompt, **options):
            yield SimpleNamespace(token_ids=[1] * options["max_tokens"], speculation=SimpleNamespace(steps=1))

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(system, "AsyncClient", Client)
    with pytest.raises(BenchError, match="--new-tokens"):
        await system.generate("nowhere", [[1, 2]], 4, speculate=False)
