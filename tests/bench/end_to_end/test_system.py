"""The benchmark against `transformers`: errors of its process."""

import sys

import pytest

from bench.end_to_end.system import transformers_generate
from bench.harness.errors import BenchError
from bench.harness.processes import output_of


def test_errors_quote_the_output_of_a_failed_program(monkeypatch):
    assert output_of([sys.executable, "-c", "print(input())"], "text") == "text\n"
    with pytest.raises(BenchError, match=r"ended with code 1:\nno such model"):
        output_of([sys.executable, "-c", "raise SystemExit('no such model')"])
    monkeypatch.setattr("bench.end_to_end.system.sys.executable", "false")
    with pytest.raises(BenchError, match=r"false -m bench\.end_to_end\.plain_transformers x .* ended with code 1"):
        transformers_generate("x", "float32", ["x"], 4)
