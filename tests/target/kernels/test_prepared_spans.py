"""Prepared spans on CUDA, run by Triton's interpreter: one launch equals its plain twin, and attention follows."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.target.engine.launching import prepare as preparing
from services.target.engine.launching.prepare import takes_prepared_spans
from services.target.kernels.reference import paged_attention
from services.target.model.cuda.graphs import GraphRunner, direct
from services.target.step.batch import build
from services.target.step.prepared import PreparedSpans
from tests.support.target.cuda.graphs import CPU, modules
from tests.support.target.cuda.interpreter import need_interpreter
from tests.support.target.driving import engine_of, load_model, opening, preparing_engine, run
from tests.support.target.prepared import Case, known_works, prepared_batch, real_rows
from tests.support.target.proposals import Drafts
from tests.support.tiny import write_model

need_interpreter()

from services.target.kernels.cuda.attention import TritonAttention  # noqa: E402
from services.target.kernels.cuda.prepared_spans import FusedSpans  # noqa: E402
from tests.support.target.cuda.triton_attention import SMALL  # noqa: E402


def outcomes(prepared, batch, samples):
    """All that a step reads of prepared spans."""
    ids, positions, slots = (torch.zeros(len(batch), dtype=torch.int64) for _ in range(3))
    prepared.put(ids, positions, slots)
    tiles = torch.zeros(len(batch), 3, dtype=torch.int32)
    tiles[:, 0] = torch.arange(len(batch))
    prepared.shift(tiles[:, 0], tiles[:, 1:])
    words = torch.zeros(int(batch.layout.nodes.sum()), 2, dtype=torch.int32)
    prepared.words(words)
    keys = torch.zeros(samples, 2, dtype=torch.int64)
    prepared.keys(keys)
    columns = prepared.tree_columns(samples) if prepared.width else ids
    return ids, positions, slots, tiles, words, keys, columns


@pytest.mark.parametrize("others", [0, 2])
@pytest.mark.parametrize("seed", range(12))
def test_one_launch_is_its_plain_twin(seed, others):
    case = Case(seed, 1 + seed % 5)
    batch, _, plain, _ = prepared_batch(case)
    samples = batch.sample_count + others  # of sessions that have no prepared span
    fused = FusedSpans(torch.from_numpy(np.concatenate(case.samples)), plain.tables, plain.maps, plain.page_size)
    for mine, expected in zip(outcomes(fused, batch, samples), outcomes(plain, batch, samples), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("spans", [PreparedSpans, FusedSpans])
@pytest.mark.parametrize("seed", range(2))
def test_attention_of_prepared_spans(seed, window, spans):
    case = Case(seed, 3).go_on()
    batch, _, prepared, works = prepared_batch(case)
    torch.manual_seed(seed)
    pages = case.allocator.total_pages + 1
    keys, values = torch.randn(2, pages, case.page_size, 2, 16).unbind(0)
    q = torch.randn(len(batch), 4, 16)
    samples = torch.from_numpy(np.concatenate(case.samples))
    there = replace(batch, prepared=spans(samples, prepared.tables, prepared.maps, prepared.page_size))
    assert len(there.ids) == len(batch)  # puts the spans
    found = TritonAttention(there, SMALL)(q, keys, values, scaling=0.25, window=window)
    known = known_works(case)
    real = torch.from_numpy(real_rows(works, known)[0])
    expected = paged_attention(q[real], keys, values, build(known, CPU), scaling=0.25, window=window)
    np.testing.assert_allclose(found[real].numpy(), expected.numpy(), atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize("spans", [PreparedSpans, FusedSpans])
def test_captured_steps_give_the_same_text(tmp_path, spans, monkeypatch):
    """As on CUDA: nothing of a prepared step but its room is known on the host."""
    plain = load_model(write_model(tmp_path, num_hidden_layers=1))
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=9) for i in range(2)]
    expected = run(engine_of(plain), requests)
    inner = modules(tmp_path, "triton")
    runner = GraphRunner(inner, [2, 12], direct)
    assert takes_prepared_spans(runner)
    monkeypatch.setattr(preparing, "spans_for", lambda _: spans)
    engine = preparing_engine(replace(plain, runner=runner))
    engine.speculation.planner.max_tokens = 5
    runner.capture(engine.cache, CPU)
    found = run(engine, requests, Drafts("mixed", requests, expected.new))
    assert found.new == expected.new
    assert found.accepted > 2
    assert engine.prepared > 2
