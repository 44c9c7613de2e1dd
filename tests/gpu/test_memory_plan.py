"""The plan of a GPU's memory beside what the GPU reports, for a target with captured steps and for a draft.

The plan may promise less than there is, never more: a target that fills its cache must not fail, and a draft must keep
to its share. `pytest -s` prints the figures, which docs/memory.md calls estimates.
"""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from outrider.config import ServeConfig, TargetConfig, parse_flags
from outrider.placement.cores import CorePlan
from outrider.placement.devices import gpu_memory
from outrider.placement.memory import CONTEXT_BYTES, GIB, MIB, jax_memory_fraction
from outrider.supervisor import memory
from outrider.supervisor.app import configure
from services.target.engine import engine
from services.target.engine.memory import device_memory, plan_memory
from services.target.process.app import build_engine
from tests.support.tiny import write_model

# What libraries warn of on a GPU is theirs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 8192}  # fmt: skip
DTYPE = "bfloat16"
SESSIONS = ("--max-running-requests", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random model of 0.25 billion parameters."""
    return write_model(tmp_path_factory.mktemp("model"), vocab=32_000, **SIZES)


@pytest.fixture
def free():
    """Memory that is free before a test, with a context and without what earlier tests left behind."""
    torch.zeros(1, device="cuda")
    gc.collect()
    return device_memory(torch.device("cuda")).free


def build(folder, monkeypatch, **flags):
    """A warm engine, and the plan that it made."""
    plans = []

    def planned(*args):
        plans.append(plan_memory(*args))
        return plans[-1]

    monkeypatch.setattr(engine, "plan_memory", planned)
    built = build_engine(folder, TargetConfig(model_path=str(folder), device="cuda", dtype=DTYPE, **flags))
    return built, plans[0]


def test_the_driver_and_pytorch_agree_on_the_memory():
    assert gpu_memory() == pytest.approx(torch.cuda.mem_get_info()[1], rel=0.01)


def test_a_target_keeps_to_its_plan(folder, free, monkeypatch):
    """Weights, graphs, activations and cache, after the warm-up of all captured steps."""
    target, plan = build(folder, monkeypatch, max_total_tokens=65_536)
    taken = free - torch.cuda.mem_get_info()[0]
    working = plan.working - CONTEXT_BYTES  # the context was there before
    planned = plan.weights + working + plan.kv_bytes
    print(f"\nplanned {planned / GIB:.2f} GiB, of them working {working / GIB:.2f}; taken {taken / GIB:.2f}")
    ahead = memory.plan_of(TargetConfig(model_path=str(folder), device="cuda", dtype=DTYPE), None)
    assert ahead.weights == pytest.approx(plan.weights, rel=0.05)
    assert ahead.token_bytes == plan.token_bytes
    assert target.scheduler.allocator.total_pages == plan.pages
    assert taken <= planned


def test_a_cache_of_all_that_is_left_leaves_room_for_the_largest_step(folder, free, monkeypatch):
    used = torch.cuda.mem_get_info()[1] - free
    target, plan = build(folder, monkeypatch)
    ahead = memory.plan_of(TargetConfig(model_path=str(folder), device="cuda", dtype=DTYPE), None, taken=used)
    print(f"\nplanned ahead {ahead.tokens} tokens, at the start {plan.tokens}")
    assert plan.tokens == pytest.approx(ahead.tokens, rel=0.05)
    assert target.scheduler.allocator.total_pages == plan.pages


_DRAFT = """
import json, sys
import jax
from outrider.config import DraftConfig, parse_flags
config = parse_flags(DraftConfig, json.loads(sys.argv[1]), "outrider draft")
from services.draft.process.loading import load_model_drafter
drafter, _ = load_model_drafter(config, None, 4)
drafter.warm_up()
stats = jax.devices()[0].memory_stats()
print(json.dumps({"devices": len(jax.devices()), "limit": stats["bytes_limit"], "peak": stats["peak_bytes_in_use"]}))
"""


def test_a_draft_keeps_to_its_share(folder, free, tmp_path):
    """The draft's own process, beside this one: what JAX has taken at its peak, and how much it may take."""
    assert free > 2 * GIB
    if not memory.jax_uses_gpus():
        pytest.skip("JAX has no CUDA plugin here")
    draft = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(folder)]
    config = parse_flags(ServeConfig, ["--model-path", str(folder), "--device", "cuda:0", *draft,
                                       "--draft-device", "cuda:0", *SESSIONS], "outrider serve")  # fmt: skip
    made = configure(config, CorePlan((0,), (0,), (0,)), tmp_path)
    share = made.draft.draft_memory_bytes
    assert share == made.target.draft_headroom_bytes > GIB
    flags = ["--model-path", str(folder), *draft, "--draft-device", "cuda:0", "--draft-memory-bytes", str(share)]
    flags += ["--draft-max-total-tokens", str(made.draft.draft_max_total_tokens), *SESSIONS]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("XLA_", "JAX_"))}
    command = [sys.executable, "-c", _DRAFT, json.dumps(flags)]
    result = subprocess.run(command, capture_output=True, text=True, env=kept, check=True, timeout=280)
    found = json.loads(result.stdout.splitlines()[-1])
    print(f"\nshare {share / GIB:.2f} GiB, JAX's peak {found['peak'] / GIB:.2f}, limit {found['limit'] / GIB:.2f}")
    assert found["devices"] == 1
    assert found["limit"] == pytest.approx(jax_memory_fraction(share, gpu_memory()) * gpu_memory(), rel=0.02)
    assert found["peak"] <= share - CONTEXT_BYTES + 64 * MIB
