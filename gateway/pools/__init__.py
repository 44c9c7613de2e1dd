"""Routing: which replica of a service runs a session."""
