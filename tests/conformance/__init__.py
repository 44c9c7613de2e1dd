"""Clients that nobody here wrote, each in an environment of its own, against a running system: `make conformance`."""
