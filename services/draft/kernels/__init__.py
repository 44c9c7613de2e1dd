"""Kernels of the draft model. Each has a plain twin in jax.numpy, which is also what runs on CPUs."""
