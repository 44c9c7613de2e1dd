"""Checkpoints that benchmarks write: random weights in the published shapes of real models."""
