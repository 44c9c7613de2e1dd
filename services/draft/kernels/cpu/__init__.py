"""The compiled path for CPUs: C++ that XLA calls. Where it cannot be had, plain JAX serves."""
