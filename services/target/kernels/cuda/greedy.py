"""The argmax of each row on CUDA, in two launches: over parts of the vocabulary in parallel, then over the parts."""

# Triton reads annotations of a kernel at run time and knows few; it names constants in capitals.
# ruff: noqa: ANN001, ANN201, N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 64  # parts of a row, each computed by one program
_BLOCK = 2048  # numbers that a program compares at a time


@triton.jit
def part_best(logits, bests, tokens, row_size, vocab, part_size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """bests: [R, PARTS] float32, infinity for NaN; tokens: [R, PARTS] int32, the first of equal ones."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best, token = float("-inf"), part * part_size
    stop = tl.minimum(token + part_size, vocab)
    for begin in tl.range(token, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + row * row_size + at, mask=at < stop, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        here, place = tl.max(x, 0, return_indices=True)
        token = tl.where(here > best, begin + place, token)
        best = tl.maximum(here, best)
    tl.store(bests + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, token)


@triton.jit
def row_best(bests, tokens, picked, PARTS: tl.constexpr):
    """picked: [R] int64, -1 if the largest number is not finite."""
    row, part = tl.program_id(0), tl.arange(0, PARTS)
    best, place = tl.max(tl.load(bests + row * PARTS + part), 0, return_indices=True)
    token = tl.load(tokens + row * PARTS + place).to(tl.int64)
    tl.store(picked + row, tl.where(tl.abs(best) < float("inf"), token, -1))


def greedy(logits: Tensor) -> Tensor:
    """Greedy tokens, as `sampler.sample_adjusted`. logits: [R, V], any float dtype. Returns [R] int64."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "a row's numbers lie together"
    bests = torch.empty(rows, _PARTS, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(rows, _PARTS, dtype=torch.int32, device=logits.device)
    picked = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        part_best[(rows, _PARTS)](
            logits, bests, tokens, logits.stride(0), vocab, triton.cdiv(vocab, _PARTS),
            PARTS=_PARTS, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
        row_best[(rows,)](bests, tokens, picked, PARTS=_PARTS, num_warps=1)
    return picked
