"""Clients of other projects, each in an environment of its own, against a running system: `make conformance`."""
