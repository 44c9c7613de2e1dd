"""The error that ends a benchmark because of its environment, such as a server that does not start."""

from __future__ import annotations

from outrider.errors import OutriderError


class BenchError(OutriderError, RuntimeError):
    """A system under test does not start, or a request fails. The message states the reason."""
