"""What ends a benchmark that nobody can mend but its caller."""

from __future__ import annotations

from outrider.errors import OutriderError


class BenchError(OutriderError, RuntimeError):
    """Such as a system that does not start, or one that refuses a request; the message says why."""
