"""The size of the KV cache of a loaded model, from what the device has."""

import logging
from dataclasses import replace

import pytest

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.placement.memory import GIB, MIB
from outrider.placement.step_sizes import step_sizes
from services.target.engine import memory
from services.target.engine.engine import TargetEngine
from services.target.engine.memory import DeviceMemory
from tests.support.target.driving import engine_of, load_model, opening, run
from tests.support.tiny import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_model(tmp_path_factory.mktemp("llama")))


@pytest.fixture
def device(monkeypatch):
    """Pretends that the model lies on an accelerator, of whose memory the weights take four fifths and more."""

    def pretend(total, weights, free=None):
        figures = DeviceMemory(total, total - weights if free is None else free, weights)
        monkeypatch.setattr(memory, "device_memory", lambda _: figures)

    return pretend


def engine(model, **flags):
    return TargetEngine(model, TargetConfig(**flags))


def test_the_cache_takes_what_weights_graphs_and_a_draft_leave(model, device, caplog):
    total, weights = 8 * GIB, 13 * GIB // 2
    device(total, weights)
    caplog.set_level(logging.INFO)
    flags = {"disable_cuda_graph": True, "draft_headroom_bytes": 300 * MIB}
    made = engine(model, **flags)
    working = step_sizes(TargetConfig(**flags), model.hidden_size, model.vocab_size).working_bytes(4)
    room = int(0.98 * total) - weights - working - 300 * MIB
    assert room > 0
    assert made.scheduler.allocator.total_pages == room // (16 * model.token_bytes)
    assert run(made, [opening(1, [5, 6, 7])]).new == run(engine_of(model), [opening(1, [5, 6, 7])]).new
    line = next(record.getMessage() for record in caplog.records if "memory of" in record.getMessage())
    for part in ("8.00 GiB", "weights 6.50", "graphs and activations", "draft headroom 0.29", "KV cache", "tokens of"):
        assert part in line


def test_a_fraction_smaller_than_the_weights_is_refused(model, device):
    device(8 * GIB, 13 * GIB // 2)
    with pytest.raises(ConfigError, match=r"--mem-fraction-static 0.7 leaves .* of 8.00 GiB, weights take 6.50"):
        engine(model, mem_fraction_static=0.7)
    assert engine(model, mem_fraction_static=0.82).scheduler.allocator.total_pages > 0


def test_memory_of_other_processes_is_not_taken(model, device):
    flags = {"disable_cuda_graph": True}
    device(8 * GIB, GIB)
    alone = engine(model, max_total_tokens=None, **flags).cache.pages
    device(8 * GIB, GIB, free=GIB // 4)
    with pytest.raises(ConfigError, match=r"a draft or other processes 6.25"):
        engine(model, **flags, draft_headroom_bytes=GIB)
    device(8 * GIB, GIB, free=2 * GIB)
    shared = engine(model, **flags).cache.pages
    assert 0 < shared < alone
    device(8 * GIB, GIB, free=3 * GIB)  # of this rank's device; another one has less
    assert engine(replace(model, shortage=GIB), **flags).cache.pages == shared
    assert engine(model, **flags).cache.pages > shared


def test_on_a_cpu_the_cache_takes_a_part_of_the_free_memory(model, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory, "free_host_memory", lambda: 100 * 16 * model.token_bytes)
    assert engine(model).cache.pages == 50
    assert engine(model, mem_fraction_static=0.25).cache.pages == 25
    assert engine(model, max_total_tokens=160).cache.pages == 10
    assert engine(model, tp_size=2).cache.pages == 25  # of each rank
    assert "0.5 of the free memory" in caplog.text
