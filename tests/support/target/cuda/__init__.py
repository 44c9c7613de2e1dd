"""Helpers for the kernels and graphs of CUDA."""
