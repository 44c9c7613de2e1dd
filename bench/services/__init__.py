"""Benchmarks of the target or the draft service alone: steps, kernels, expansion, quality and determinism."""
