"""Attention, product, sampling and cache kernels, each with a plain twin, and the paged KV cache they work on."""
