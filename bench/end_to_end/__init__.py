"""Benchmarks of the whole system: throughput, accept length, online learning."""
