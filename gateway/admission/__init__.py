"""Admission: API keys, concurrency limits, Retry-After."""
