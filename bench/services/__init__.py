"""Benchmarks of one service alone: steps, kernels, growth, quality, determinism."""
