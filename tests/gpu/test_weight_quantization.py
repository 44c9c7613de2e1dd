"""--quantization on CUDA: the model runs with narrower weights, and proposals change nothing of its text."""

import pytest
import torch

from outrider.config import TargetConfig
from services.target.engine.engine import TargetEngine
from services.target.model.loading.load import load
from tests.support.target.driving import opening, run
from tests.support.target.greedy_text import NEW, PROMPT, proposals_near
from tests.support.tiny import write_model

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("choice", ["fp8", "int8"])
def test_narrower_weights(choice, tmp_path):
    pytest.importorskip("torchao")
    folder = write_model(tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    config = TargetConfig(
        device="cuda", dtype="bfloat16", quantization=choice, disable_cuda_graph=True, max_total_tokens=2048
    )
    model = load(folder, config)
    weight = model.runner.module.model.layers[0].mlp.up_proj.weight
    assert type(weight.data) is not torch.Tensor
    plain = run(TargetEngine(model, config), [opening(1, PROMPT, max_tokens=NEW)]).new[1]
    assert len(plain) == NEW
    speculative = run(TargetEngine(model, config), [opening(1, PROMPT, max_tokens=NEW)], proposals_near(plain, 1))
    assert speculative.accepted > 0
