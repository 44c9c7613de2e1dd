"""Decoders that have programs of kernels, as their modules and in few launches, with steps for both."""

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from services.target.kernels.dispatch import choose
from services.target.kernels.kv_cache import KVCache
from services.target.model import attention
from services.target.model.loading.probe import pass_a_token
from services.target.model.modules import ModuleRunner
from services.target.step.batch import build
from tests.support.target.works import allocator_of, random_works
from tests.support.tiny import VOCAB, write_model

CPU = torch.device("cpu")
MODELS = {
    "llama": {},
    "llama-bias": {"attention_bias": True, "tie_word_embeddings": True},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 72, "head_dim": 20, "num_attention_heads": 4,
                  "num_key_value_heads": 2},
    "many heads": {"hidden_size": 80, "num_attention_heads": 40, "num_key_value_heads": 1, "head_dim": 8},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 7, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
}  # fmt: skip


def written(folder, name, **more):
    family = {"llama-bias": "llama", "odd sizes": "llama", "many heads": "llama"}.get(name, name)
    return write_model(folder, family, **MODELS[name] | more)


def module_of(folder, device=CPU, dtype=torch.float32):
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention.registered(), dtype=dtype)
    return module.to(device).eval().requires_grad_(False)


def runners(folder, backend, device=CPU, dtype=torch.float32):
    """The modules, and the same model in few launches, with a probe of either."""
    from services.target.model.cuda.fused import FusedRunner

    probe = pass_a_token(module_of(folder, device, dtype), device)
    planner = choose(backend, device)
    modules, few = (module_of(folder, device, dtype) for _ in range(2))
    return ModuleRunner(modules, planner), FusedRunner(few, planner, probe, 512), probe


def random_batch(rng, device=CPU, page_size=4, sessions=3, most=1000, longest=120):
    """most: rows of a chunk; longest: tokens of a session, at most."""
    works = random_works(rng, page_size, sessions, longest)
    for work in works:
        session = work.chunk.session
        work.chunk.start = max(work.chunk.start, work.chunk.stop - most)
        session._tokens[: session.length] = rng.integers(0, VOCAB, session.length)
    return build(works, device), works


def few_rows(most, device=CPU):
    """As `random_batch`, of no more than `most` rows."""
    for seed in range(100):
        batch, works = random_batch(np.random.default_rng(seed), device, most=3, longest=50)
        if most // 2 <= len(batch) <= most:
            return batch, works
    raise AssertionError("no batch is so small")


def cache_of(probe, works, device=CPU, dtype=torch.float32):
    allocator = allocator_of(works)
    shapes = [probe.shapes[layer] for layer in range(len(probe.shapes))]
    cache = KVCache(shapes, allocator.total_pages, allocator.page_size, dtype, device)
    rng = np.random.default_rng(0)
    for pool in (*cache.keys, *cache.values):
        pool[1:] = torch.from_numpy(rng.standard_normal(pool[1:].shape)).to(device, dtype)
    return cache
