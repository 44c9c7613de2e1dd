"""Compiled CPU kernels: C++ that XLA calls. Plain JAX serves where they are not available."""
