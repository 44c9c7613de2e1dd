"""Shared parts of all benchmarks: child processes, prompts, reports and types of command-line flags."""
