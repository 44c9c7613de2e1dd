"""Matrices in memory and products with them: plain, quantized, packed, mixed-precision, or sharded over devices."""
