"""Counts what JAX compiles. A service that serves compiles nothing: every session would wait for it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import jax

log = logging.getLogger(__name__)

# Recorded by JAX for every program that it hands to its compiler, kept ones that are read from a file included.
_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Programs that this process has compiled since this was made, whatever they are for.

    total: all of them; while_serving: those after `serve`. doing: what is run at present, in words, for the log
    """

    def __init__(self) -> None:
        self.total = 0
        self.while_serving = 0
        self.doing = "nothing that was warmed up"
        self._serving = False
        _watching.add(self)

    def serve(self) -> None:
        """The warm-up is over: from now on a compilation is warned of."""
        self._serving = True

    def note(self, name: str, seconds: float) -> None:
        """A program has been compiled."""
        self.total += 1
        if self._serving:
            self.while_serving += 1
            log.warning(
                "the program %s was compiled while serving, in %.2f s, for %s; it should have been warmed up",
                name, seconds, self.doing,
            )  # fmt: skip


_watching: weakref.WeakSet[Compilations] = weakref.WeakSet()


def _listen(event: str, seconds: float, **facts: Any) -> None:
    if event == _EVENT:
        for watching in list(_watching):
            watching.note(str(facts.get("fun_name", "without a name")), seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)
