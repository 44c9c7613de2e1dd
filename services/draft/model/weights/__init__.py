"""Checkpoint tensors as JAX arrays."""
