"""Checkpoints that benchmarks write: random GGUF files in the shapes of real models, and a larger target for a draft."""
