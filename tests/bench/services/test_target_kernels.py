"""The benchmark of the CPU kernels: a small run, and equal results of both sides."""

import json

import pytest
import torch

from bench.services import target_kernels as kernels
from services.target.kernels.cpu import library
from services.target.kernels.cpu.matrices.weights import Format, packed

pytestmark = [
    pytest.mark.threads,
    pytest.mark.skipif(not library.available(), reason="the CPU kernels are not available"),
]


@pytest.fixture
def small(monkeypatch, report_folder):
    """Sizes for a run of about a second."""
    monkeypatch.setattr(kernels, "SPILL", 1 << 18)
    monkeypatch.setattr(kernels, "WEIGHTS", {"qkv": (96, 64)})
    monkeypatch.setattr(kernels, "WEIGHTS_1_5B", {"down": (40, 256)})
    monkeypatch.setattr(kernels, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(kernels, "read_bandwidth", lambda threads: 1e9 * threads)
    return report_folder


def test_small_run(small):
    before = torch.get_num_threads()
    kernels.main(["--rows", "1", "8", "--contexts", "40", "--threads", "1"])
    assert torch.get_num_threads() == before
    rows = json.loads((small / "kernels.json").read_text())["rows"]
    assert [row["rows"] for row in rows] == [1, 8] * 3 + [1, 16, 4]
    assert {row["kernel"] for row in rows} == {"product, bfloat16", "product, int8", "product, int4",
                                               "attention, bfloat16"}  # fmt: skip
    wide, narrow = (next(row for row in rows if row["kernel"] == f"product, {name}") for name in ("bfloat16", "int8"))
    assert narrow["floor_us"] < wide["floor_us"]
    assert wide["floor_us"] == pytest.approx(1e6 * packed(torch.zeros(96, 64), Format.BFLOAT16).bytes / 1e9)
    assert all(row["us"] > 0 and row["PyTorch us"] > 0 for row in rows)


def test_stored_formats_with_the_shapes_of_a_larger_model(small):
    formats = ["int4", kernels.FLOAT8, *kernels.STORED]
    kernels.main(["--model", "1.5b", "--formats", *formats, "--rows", "1", "--threads", "1"])
    rows = json.loads((small / "kernels-1.5b.json").read_text())["rows"]
    assert [row["kernel"] for row in rows] == [f"product, {name}" for name in formats]
    assert all(row["GB/s"] > 0 for row in rows)


def test_both_sides_compute_equal_results():
    weight = torch.randn(96, 64) / 8
    attention_works, pages = kernels.works_of(2, 4, 40)
    batch = kernels.build(attention_works, kernels.CPU)
    cache = kernels.KVCache([kernels.LayerShape(3, 64, 64)], pages, 16, torch.bfloat16, kernels.CPU)
    for pool in (*cache.keys, *cache.values):
        pool.normal_()
    q = torch.randn(len(batch), 9, 64).bfloat16()
    ours, theirs = (
        kernel(batch)(q, cache.keys[0], cache.values[0], scaling=kernels.SCALE)
        for kernel in (kernels.NativeAttention, kernels.GroupedAttention)
    )
    torch.testing.assert_close(ours, theirs, atol=2e-2, rtol=2e-2)
    program, rows, nothing = kernels.program_of([packed(weight, Format.BFLOAT16)] * 3, 5, 1)
    program.run(rows, nothing)  # a program that has only products


def test_tree_of_fifteen_nodes():
    tree = kernels.tree_of(15)
    assert tree.parents.tolist()[:5] == [-1, 0, 0, 1, 1]
    assert tree.depths.max() == 4
