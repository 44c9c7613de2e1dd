"""Speedup of speculation as context, sessions, acceptance, draft latency and network latency grow."""
