"""Matrices in memory: 8-bit, mixed-precision, and parts of a device mesh."""
