"""Weights of compiled programs, in the number formats of their files where the kernels have them."""
