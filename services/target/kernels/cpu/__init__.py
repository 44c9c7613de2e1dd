"""Kernels for CPUs in C++: products of few rows with laid-out weights, paged attention, whole decoders, draws.

`csrc/` is compiled by `build`, bound by `library`; `weights`, `attention`, `program` and `draw` are what others use.
Where there is no compiler, or the processor lacks an instruction that they need, PyTorch's own operators serve instead.
"""
