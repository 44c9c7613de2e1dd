"""Packed weights, their products with few rows, and products that are batch-invariant."""
