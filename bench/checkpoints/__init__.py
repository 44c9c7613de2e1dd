"""Checkpoints that benchmarks write: random GGUF files in real models' shapes, and a larger target for a draft."""
