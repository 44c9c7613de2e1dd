"""--enable-torch-compile: the same tokens, from programs compiled for some numbers of rows."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from outrider.config import TargetConfig
from outrider.errors import ConfigError
from outrider.serving.features import FeatureSpec
from services.target.model.cuda.compiled import CompiledRunner, compiled
from services.target.model.cuda.graphs import GraphRunner, direct
from services.target.model.loading.load import load
from tests.support.target.cuda.graphs import modules
from tests.support.target.driving import engine_of, opening, run
from tests.support.target.features import F32, Reader, configured
from tests.support.tiny import write_model

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on the CPU"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch.compile's own
]


@pytest.mark.long
def test_compiled_steps_give_the_same_text_and_states(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    requests = [opening(i, [5 + i, 6, 7, 5 + i, 6], max_tokens=8) for i in range(2)]
    plain = load(folder, TargetConfig(device="cpu", dtype="float32"))
    expected, states = run(engine_of(plain), requests).new, sent(engine_of(plain), requests)
    torch._dynamo.reset()
    counters.clear()
    runner = GraphRunner(compiled(modules(folder), 2), [2, 5], direct)
    engine = engine_of(replace(plain, runner=runner))
    # Vectors that the processor reports need no trial programs, which take as long as those of the model.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True, "compile_threads": 1}):
        runner.capture(engine.cache, engine.model.device)
        assert run(engine, requests).new == expected
        found = sent(engine, requests)
    assert {key.size for key in runner.steps if key.final} == {2, 5}
    for one, other in zip(found, states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-4)
    assert counters["stats"]["unique_graphs"] == 1  # for the size that is to be compiled, both layers, and any states
    assert not counters["graph_break"]


def sent(engine, requests):
    """The hidden states that sessions are sent."""
    spec = configured(engine, FeatureSpec((0, 2), final=True, format=F32))
    reader = Reader(engine)
    while not engine.idle:
        reader.step()  # captures
    for request in requests:
        reader.open(replace(request, feature_spec=spec))
    reader.run()
    return [reader.states(request.session_id) for request in requests]


def test_flags_compile_steps_of_some_sizes(tmp_path):
    flags = {"enable_torch_compile": True, "torch_compile_max_bs": 2, "speculative_num_draft_tokens": 4}
    model = load(write_model(tmp_path), TargetConfig(device="cpu", **flags))
    assert isinstance(model.runner, GraphRunner)
    assert isinstance(model.runner.runner, CompiledRunner)
    assert model.runner.sizes == [1, 2, 4, 8]


def test_too_small_a_limit_is_refused(tmp_path):
    config = TargetConfig(device="cpu", enable_torch_compile=True, torch_compile_max_bs=0)
    with pytest.raises(ConfigError, match="--torch-compile-max-bs must be 1 or more"):
        load(write_model(tmp_path), config)
