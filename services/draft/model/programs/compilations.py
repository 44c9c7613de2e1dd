"""Counts JAX compilations. A serving process compiles nothing, because every session would wait for it."""

from __future__ import annotations

import logging
import weakref

import jax

log = logging.getLogger(__name__)

# Recorded by JAX for every program that it hands to its compiler, also for those that are read from the cache.
_EVENT = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """Programs that this process has compiled since this object was made.

    total: all of them; while_serving: those after `serve`. doing: the current work, in words, for the log
    """

    def __init__(self) -> None:
        self.total = 0
        self.while_serving = 0
        self.activity = "a shape that was not warmed up"
        self._serving = False
        _counters.add(self)

    def serve(self) -> None:
        """The warm-up is done: further compilations are counted and logged as warnings."""
        self._serving = True

    def note(self, name: str, seconds: float) -> None:
        """Count a compiled program."""
        self.total += 1
        if self._serving:
            self.while_serving += 1
            log.warning(
                "the program %s was compiled while serving, in %.2f s, for %s; the warm-up should have compiled it",
                name, seconds, self.activity,
            )  # fmt: skip


_counters: weakref.WeakSet[Compilations] = weakref.WeakSet()


def _on_compile(event: str, duration_secs: float, **facts: str | int) -> None:
    if event == _EVENT:
        for counter in list(_counters):
            counter.note(str(facts.get("fun_name", "without a name")), duration_secs)


jax.monitoring.register_event_duration_secs_listener(_on_compile)
