"""Benchmarks on a GPU: steps of a model and of an engine, and attention by tile."""
