"""Speculation modes: which there are, their throughput at a load, and which one a step has."""
