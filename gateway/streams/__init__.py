"""Streams to the services: one reconnecting stream per replica, which carries all sessions."""
