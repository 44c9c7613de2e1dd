"""The benchmark of self-speculation with a tiny model."""

import numpy as np
import pytest

from bench.services.self_speculation import compare, engines_of, write_noisy
from outrider.speculation.sampling import SamplingParams
from services.target.kernels.cpu import library
from tests.support.tiny import write_model

pytestmark = pytest.mark.skipif(not library.available(), reason="self-speculation needs the compiled programs")


@pytest.mark.parametrize(("number_format", "source"), [("bfloat16", "int4"), ("bfloat16", "int8"), ("int8", "int4")])
def test_row_of_the_report(tmp_path, number_format, source):
    model = write_noisy(write_model(tmp_path / "model"), tmp_path / "noisy")
    engines = engines_of(model, number_format, source, 2)
    prompts = [np.array([5 + i, 6, 7], np.uint32) for i in range(5)]
    row = compare(engines, prompts, SamplingParams(1.0, seed=3), 2, 30)
    assert 1 <= row["accept length"] <= row["draft tokens"] + 1 + 1e-9
    assert 0 < row["acceptance rate"] <= 1
    assert row["speedup"] == pytest.approx(row["self"] / row["plain"])
    assert 0 < row["floor ms"] < row["ms per token"]
