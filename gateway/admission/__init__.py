"""Admission: hosts and origins, API keys, concurrency limits, Retry-After."""
