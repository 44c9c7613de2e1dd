"""Compiled programs are cached on disk: a second start compiles none of them."""

from collections import Counter

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from services.draft.process.program_cache import cache_programs
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


@pytest.mark.parametrize("length", [0, 1, 500, -1], ids=["empty", "byte", "part", "almost"])
def test_a_torn_program_is_compiled_and_cached_again(tmp_path, events, caplog, length):
    """As a full disk, or a kill, leaves it. JAX itself would report it, and compile it at every start."""

    def start() -> tuple[int, int]:
        jax.clear_caches()
        compilation_cache.reset_cache()
        cache_programs(tmp_path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        events.clear()
        assert jax.jit(lambda x: x * 2 + length)(1.0) == 2 + length
        return events["cache_hits"], events["cache_misses"]

    _, compiled = start()
    assert compiled > 0
    assert start() == (compiled, 0)
    (*_, entry) = sorted(tmp_path.glob("*-cache"))
    entry.write_bytes(entry.read_bytes()[:length])
    assert start() == (compiled - 1, 1)
    assert f"{entry.name} is torn" in caplog.text
    assert start() == (compiled, 0)
