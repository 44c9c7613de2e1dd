"""CUDA kernels in Triton and Gluon: attention, matrix products of few rows, cache writes, greedy sampling."""
