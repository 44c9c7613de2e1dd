"""JAX devices of the draft's tests, a configuration that `tests/draft/conftest.py` sets."""

DEVICES = 4
