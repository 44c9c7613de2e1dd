"""Checkpoints that benchmarks need and that this machine cannot download."""
