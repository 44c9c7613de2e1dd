"""The CUDA attention's tables follow prepared spans; run by Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.target.engine.prepare import takes_prepared_spans
from services.target.kernels.reference import paged_attention
from services.target.model.cuda.graphs import GraphRunner, direct
from services.target.step.batch import build
from tests.support.target.graphs import CPU, history, modules
from tests.support.target.interpreter import need_interpreter
from tests.support.target.prepared import Case, known_works, prepared_batch, real_rows
from tests.support.tiny import write_model

need_interpreter()

from services.target.kernels.cuda.attention import TritonAttention  # noqa: E402
from tests.support.target.triton_attention import SMALL  # noqa: E402


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("seed", range(4))
def test_attention_of_prepared_spans(seed, window):
    case = Case(seed, 3).go_on()
    batch, _, prepared, works = prepared_batch(case)
    torch.manual_seed(seed)
    pages = case.allocator.total_pages + 1
    keys, values = torch.randn(2, pages, case.page_size, 2, 16).unbind(0)
    q = torch.randn(len(batch), 4, 16)
    there = replace(batch, prepared=prepared)
    found = TritonAttention(there, SMALL)(q, keys, values, scaling=0.25, window=window)
    known = known_works(case)
    real = torch.from_numpy(real_rows(works, known)[0])
    expected = paged_attention(q[real], keys, values, build(known, CPU), scaling=0.25, window=window)
    np.testing.assert_allclose(found[real].numpy(), expected.numpy(), atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize("size", [0, 48])
def test_captured_steps_take_prepared_spans(tmp_path, size):
    inner = modules(write_model(tmp_path), "triton")
    assert takes_prepared_spans(inner)
    case = Case(1, 3, room=5).go_on()
    batch, _, prepared, works = prepared_batch(case)
    cache = history(works)
    runner = inner
    if size:
        runner = GraphRunner(inner, [size], direct)
        runner.capture(cache, CPU)
        assert takes_prepared_spans(runner)
    with torch.inference_mode():
        found = runner.forward(replace(batch, prepared=prepared), cache).logits.clone()
        known = known_works(case)
        expected = inner.forward(build(known, CPU), history(works)).logits
    real = torch.from_numpy(real_rows(works, known)[0])
    torch.testing.assert_close(found[real], expected, atol=1e-4, rtol=1e-4)
