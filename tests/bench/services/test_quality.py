"""The quality benchmark: figures of known distributions, and detection of 4-bit checkpoints."""

import math

import pytest
import torch
from safetensors.torch import save_file

from bench.services.quality import BLOCK, NARROW_LEVELS, compared, levels_of


def test_figures_of_known_distributions():
    right = [torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]).log()]
    found = [torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]).log()]
    same = compared([[9, 0, 1]], [[9]], right, right)
    assert same == {"top-1": "100.0%", "KL": "0.0000", "perplexity / float32": "1.000"}
    other = compared([[9, 0, 1]], [[9]], right, found)
    assert other["top-1"] == "50.0%"
    assert float(other["KL"]) == pytest.approx(0.25 * math.log(2) / 2, abs=1e-4)
    assert float(other["perplexity / float32"]) == pytest.approx(math.sqrt(2), abs=1e-3)


def test_four_bit_checkpoints_are_detected(tmp_path):
    torch.manual_seed(0)
    plain = torch.randn(32, 128).bfloat16()
    blocks = plain.float().view(32, -1, BLOCK)
    low, high = blocks.amin(2, keepdim=True), blocks.amax(2, keepdim=True)
    step = (high - low) / 15
    narrow = (((blocks - low) / step).round() * step + low).view(32, 128).bfloat16()
    for name, weight, was_narrow in (("plain", plain, False), ("narrow", narrow, True)):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"model.layers.0.mlp.down_proj.weight": weight}, folder / "model.safetensors")
        assert (levels_of(folder) <= NARROW_LEVELS) == was_narrow
