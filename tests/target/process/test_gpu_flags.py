"""A target on a CPU that was started with the flags of a GPU: it serves, and says what it does instead."""

import pytest
import torch

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from services.target.kernels.cpu import library
from services.target.model.loading.load import pick_device
from services.target.process.app import build_engine
from tests.support.checkpoints.families import write_family
from tests.support.tiny import write_model

FLAGS = {"cuda_graph_max_bs": 8, "cuda_graph_bs": (1, 2), "disable_cuda_graph_padding": True, "max_total_tokens": 1024}
needs_kernels = pytest.mark.skipif(not library.available(), reason="no compiled kernels")


@pytest.fixture
def engine_of(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def build(write=write_model, *args, **flags):
        return build_engine(write(tmp_path / "model", *args), TargetConfig(device="cpu", **FLAGS, **flags))

    return build


@needs_kernels
def test_float16_is_computed_in_bfloat16_where_there_are_kernels(engine_of, caplog):
    engine = engine_of(dtype="float16", attention_backend="triton", disable_overlap_schedule=True)
    assert engine.model.dtype == torch.bfloat16
    for note in (
        "--dtype float16: a CPU has no kernels for it; the target computes in bfloat16",
        "--cuda-graph-max-bs, --cuda-graph-bs, --disable-cuda-graph-padding are without effect on a CPU",
        "--disable-overlap-schedule is without effect on a CPU",
        "--attention-backend triton needs a CUDA device; the CPU's own kernels are used",
    ):
        assert caplog.text.count(note) == 1, note


def test_float16_is_computed_in_float32_elsewhere(engine_of, caplog):
    """Also module by module, where the flags of CUDA graphs were refused."""
    engine = engine_of(write_family, "granite", dtype="float16")
    assert engine.model.dtype == torch.float32
    assert caplog.text.count("the target computes in float32") == 1


@needs_kernels
def test_fp8_is_int8(engine_of, caplog):
    plain = engine_of().model.runner.weight_bytes
    engine = engine_of(quantization="fp8")
    assert engine.model.runner.weight_bytes < 0.6 * plain
    assert caplog.text.count("weights are int8") == 1


def test_a_tpu_is_refused_with_what_runs_there():
    with pytest.raises(ConfigError, match="a TPU runs the draft service, `outrider draft --draft-device tpu`"):
        pick_device("tpu")
