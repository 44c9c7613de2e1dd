"""Benchmarks of the whole system over REST: throughput, accept length and online training."""
