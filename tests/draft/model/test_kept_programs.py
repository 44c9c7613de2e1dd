"""Compiled programs are cached on disk: a second start compiles none of them."""

from collections import Counter

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support.draft.helpers import standalone
from tests.support.tiny import write_model


@pytest.fixture
def events(tmp_path, monkeypatch):
    """JAX's cache in a folder of its own, and its events."""
    found: Counter[str] = Counter()

    def listen(event: str, **facts: str) -> None:
        found[event.rpartition("/")[2]] += 1

    kept = {
        name: getattr(jax.config, name)
        for name in ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    }
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)
    for name, value in kept.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_second_start_compiles_no_program(tmp_path, events):
    folder = write_model(tmp_path / "model", num_hidden_layers=1)

    def start() -> tuple[int, int]:
        """Numbers of cache hits and misses of a start."""
        jax.clear_caches()  # as in a process of its own
        engine = standalone(folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # these are small
        events.clear()
        engine.drafter.warm_up()
        return events["cache_hits"], events["cache_misses"]

    found, compiled = start()
    assert found == 0
    assert compiled > 5  # a program a shape, and that of moves
    assert start() == (compiled, 0)
